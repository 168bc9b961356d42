/* Prefixes that requests share, found in page tables: what treegen.ir.tree.shared_prefixes.shared_pages finds. */
#include "arrays.h"

#define ROOT (-1)
#define NOBODY (-1)
enum { AHEAD = 8 }; /* requests whose page ids are fetched before they are read: rows lie far apart in memory */

#ifdef __GNUC__
#define FETCH(entry) __builtin_prefetch(entry)
#else
#define FETCH(entry) ((void)(entry))
#endif

/*
 * A node of the trie, with the edge that leads to it from its parent: pages first:end of the request `owner`. page: the
 * one at `first`.
 */
typedef struct {
    int32_t parent, page, owner, first, end;
} Node;

/* The page ids of request i are table[begin[i]:]. slots: a hash table of nodes by parent and page, NOBODY if free. */
typedef struct {
    const int32_t *table;
    const int64_t *begin;
    int32_t *slots;
    int64_t mask;
    Node *node;
    int32_t nodes;
} Trie;

/* Returns the slot of the node with this parent and page, or the free slot where it belongs. */
static int32_t *slot_of(const Trie *trie, int32_t parent, int32_t page) {
    uint64_t key = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)page) * UINT64_C(0x9E3779B97F4A7C15);
    key = (key ^ key >> 32) * UINT64_C(0xD6E8FEB86659FD93); /* otherwise pages at equal distances crowd together */
    for (int64_t slot = (int64_t)(key >> 32) & trie->mask;; slot = (slot + 1) & trie->mask) {
        int32_t node = trie->slots[slot];
        if (node == NOBODY || (trie->node[node].parent == parent && trie->node[node].page == page))
            return trie->slots + slot;
    }
}

/* Puts an edge of a request into this slot, and returns the node that it leads to. */
static int32_t add(Trie *trie, int32_t *slot, Node made) {
    trie->node[trie->nodes] = made;
    return *slot = trie->nodes++;
}

/* Returns the place from `first` to `last` where two requests part, which have the same page at `first`. */
static int32_t common(const int32_t *row, const int32_t *other, int32_t first, int32_t last) {
    if (row[last - 1] == other[last - 1]) return last;
    int32_t same = first, differs = last - 1;
    while (differs - same > 1) {
        int32_t middle = same + (differs - same) / 2;
        int32_t either[] = {same + (middle - same) / 2, middle + (differs - middle) / 2}; /* the next one */
        for (int64_t i = 0; i < 2; i++) FETCH(row + either[i]), FETCH(other + either[i]);
        if (row[middle] == other[middle])
            same = middle;
        else
            differs = middle;
    }
    return differs;
}

/* Finds what a request of `count` pages shares, and adds it to the trie. Returns the shared pages. */
static int32_t insert(Trie *trie, int32_t request, int32_t count, int32_t *shared_with) {
    const int32_t *row = trie->table + trie->begin[request];
    int32_t above = ROOT, depth = 0;
    *shared_with = NOBODY;
    while (depth < count) {
        int32_t *slot = slot_of(trie, above, row[depth]), node = *slot;
        if (node == NOBODY) {
            add(trie, slot, (Node){above, row[depth], request, depth, count});
            break;
        }
        Node *edge = trie->node + node;
        const int32_t *other = trie->table + trie->begin[edge->owner];
        int32_t last = (int32_t)at_most(edge->end, count);
        depth = common(row, other, edge->first, last);
        *shared_with = edge->owner;
        if (depth < last) { /* it branches off within the edge, which becomes two */
            int32_t upper = add(trie, slot, (Node){above, edge->page, edge->owner, edge->first, depth});
            edge->parent = upper, edge->page = other[depth], edge->first = depth;
            *slot_of(trie, upper, edge->page) = node;
            add(trie, slot_of(trie, upper, row[depth]), (Node){upper, row[depth], request, depth, count});
            break;
        }
        above = node;
    }
    return depth;
}

/*
 * table, begin, length: see HostPages. slots: a power of two, at least 4 for each request. memory: room for the slots
 * and 10 more words for each request. found: gets `[2, requests]`; the first request with each one's longest shared
 * prefix, -1 for none, and the tokens of this prefix. Returns the number of nodes, at most 2 for each request.
 */
int64_t shared_prefixes(const int32_t *table, const int64_t *begin, const int32_t *length, int64_t requests,
                        int64_t page_size, int64_t slots, int32_t *memory, int32_t *found) {
    Trie trie = {table, begin, memory, slots - 1, (Node *)(memory + slots), 0};
    memset(memory, 0xff, slots * sizeof *memory);
    int32_t size = (int32_t)page_size, parted = 0; /* where the last request parted from another one */
    for (int64_t i = 0; i < requests; i++) {
        if (i + AHEAD < requests) {
            const int32_t *row = table + begin[i + AHEAD];
            FETCH(row), FETCH(row + at_most(parted, length[i + AHEAD] / size));
        }
        int32_t shared = insert(&trie, (int32_t)i, length[i] / size, found + i);
        if (shared) parted = shared;
        found[requests + i] = shared * size;
    }
    return trie.nodes;
}
