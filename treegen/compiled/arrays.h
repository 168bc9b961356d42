/* Memory, offsets and sorting, for the other files. */
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_MEMORY (-1)

/* Hands out parts of one block of memory, at multiples of 8 bytes. */
typedef struct {
    char *block;
    int64_t used;
} Memory;

static inline void *take(Memory *memory, int64_t count, int64_t size) {
    void *part = memory->block + memory->used;
    memory->used += (count * size + 7) & ~(int64_t)7;
    return part;
}
#define TAKE(memory, type, count) ((type *)take(memory, count, sizeof(type)))

/*
 * Columns of a table that are written together are made PADDING words apart from its own distance, and then copied:
 * at distances of some thousand bytes they would take one another's place in the cache.
 */
enum { PADDING = 24 };

static inline void copy_columns(int32_t *table, const int32_t *padded, int64_t columns, int64_t length) {
    for (int64_t i = 0; i < columns; i++)
        memcpy(table + i * length, padded + i * (length + PADDING), length * sizeof *table);
}

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Turns counts[0:n] into offsets[0:n + 1], in place: the array has room for one more. */
static inline int64_t to_offsets(int64_t *counts, int64_t n) {
    int64_t total = 0;
    for (int64_t i = 0; i <= n; i++) {
        int64_t count = i < n ? counts[i] : 0;
        counts[i] = total;
        total += count;
    }
    return total;
}

/* Sorts order[0:n] by rising key[order[i]], stable: runs of 8 by insertion, then merged. spare: room for n more. */
static inline void sort_by_key(int64_t *order, int64_t *spare, const int64_t *key, int64_t n) {
    int64_t sorted = 1;
    while (sorted < n && key[order[sorted - 1]] <= key[order[sorted]]) sorted++;
    if (sorted >= n) return; /* nearly always, where requests keep their seats */
    const int64_t run = 8;
    for (int64_t begin = 0; begin < n; begin += run) {
        for (int64_t i = begin + 1; i < at_most(begin + run, n); i++) {
            int64_t each = order[i], j = i;
            for (; j > begin && key[order[j - 1]] > key[each]; j--) order[j] = order[j - 1];
            order[j] = each;
        }
    }
    int64_t *from = order, *to = spare;
    for (int64_t width = run; width < n; width *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * width) {
            int64_t middle = at_most(begin + width, n), end = at_most(begin + 2 * width, n);
            int64_t a = begin, b = middle;
            for (int64_t i = begin; i < end; i++)
                to[i] = a < middle && (b >= end || key[from[a]] <= key[from[b]]) ? from[a++] : from[b++];
        }
        int64_t *merged = to;
        to = from;
        from = merged;
    }
    if (from != order) memcpy(order, from, n * sizeof *order);
}
