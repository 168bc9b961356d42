/* The entries of work items: which tokens of which request each one reads. */
#pragma once
#include "arrays.h"
#include "batch_tables.h"

/*
 * What is known of requests of several rows; NULL where each request has one. By row: its request, and its number among
 * the request's rows. By seat: its request. own: by node, the number of the own token of its request's first row, for
 * the last nodes of requests of several rows; NONE for all others. least: by request, the least tokens for which its
 * entries are right.
 */
typedef struct {
    int32_t *request, *number, *of_seat, *own, *least;
} Several;
#define NOT_SEVERAL ((Several){NULL, NULL, NULL, NULL, NULL})

/* A plan, with the columns of its tree that its tables follow from. */
typedef struct {
    int64_t groups, segments;
    const int32_t *row_lo, *group_rows, *segment_indptr, *segment;
    const BatchTree *tree;
    const int32_t *node_tokens, *node_slots, *row_of_rank, *seat, *above, *shared;
    Several several;
} Planned;

enum { NONE = INT32_MAX };
enum { LO = RANK_LO, HI = RANK_HI }; /* lines of a plan's segments, as of spans */

/* Rows begin:begin + rows of a group, and their segments up to `behind`. */
typedef struct {
    int64_t group, begin, rows, behind;
} ItemRows;

/* Tokens start:stop of a node, which rows lo:hi of an item see. */
typedef struct {
    int64_t node, start, stop, lo, hi;
} Run;

static inline ItemRows rows_of(const Planned *plan, int64_t group, int64_t begin, int64_t rows) {
    return (ItemRows){group, begin, rows, plan->segment_indptr[group + 1]};
}

static inline int is_seen(const Planned *plan, const ItemRows *item, int64_t s) {
    int64_t lo = plan->segment[LO * plan->segments + s], hi = plan->segment[HI * plan->segments + s];
    return lo < item->begin + item->rows && hi > item->begin;
}

static inline Run run_of(const Planned *plan, const ItemRows *item, int64_t s) {
    const int32_t *segment = plan->segment + s;
    int64_t all = plan->segments, lo = segment[LO * all] - item->begin, hi = segment[HI * all] - item->begin;
    return (Run){segment[NODE * all], segment[START * all], segment[STOP * all], at_least(lo, 0),
                 at_most(hi, item->rows)};
}

/*
 * Finds the next run of an item from segment `s` on. Returns the segment behind it; `behind` if there is none, with no
 * tokens in the run.
 */
static inline int64_t next_run(const Planned *plan, const Room *room, const ItemRows *item, int64_t s, Run *run) {
    while (s < item->behind && !is_seen(plan, item, s)) s++;
    run->start = run->stop = 0;
    if (s == item->behind) return s;
    *run = run_of(plan, item, s++);
    if (!plan->several.own) return s;
    /* A mask hides what is behind a row, unless the run begins among own tokens. */
    int64_t own = plan->several.own[run->node];
    int joins = room->causal && own != NONE && (run->start < own || run->start == 0);
    for (; s < item->behind; s++) {
        if (!is_seen(plan, item, s)) continue;
        Run more = run_of(plan, item, s);
        if (more.node != run->node || more.start != run->stop) break;
        if (!joins && (more.lo != run->lo || more.hi != run->hi)) break;
        run->stop = more.stop;
    }
    return s;
}

/* Writes the entry of a run. Returns the most tokens that it has until the next plan. */
int64_t write_entry(const Planned *plan, const Room *room, const ItemRows *item, const Run *run, int32_t *entry);

/* Finds what is known of requests of several rows, before there are entries. width: seats. */
int64_t room_of_several(const BatchTree *tree, int64_t width);
Several find_several(const BatchTree *tree, int64_t width, Memory *memory);
