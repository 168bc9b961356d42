/* The requests that a plan serves, for planned_seats.c and late_requests.c. */
#pragma once
#include "arrays.h"

enum { ROW, EPOCH, SHARED_WITH, SHARED_TOKENS, TOKENS, ROWS }; /* lines of LiveBatch.table */
enum { KNOWN_EPOCH, MOST, LEAST, CLAIM_OWNER = 5, FURTHER = 8, END = 9 }; /* lines of RequestSchedule.seats */
enum { CLAIMING, OWNER, PAGES }; /* lines of the table of claims */
/* Lines of the state, by seat: four of the batch when it was seen last, and what has been found since the plan. */
enum { SEEN, SAME = 4, IS_OTHER, HAS_ARRIVED, HAS_ENDED, IS_OWNER, AGAIN };
enum { BEGUN_EPOCH = AGAIN + 1, BEGUN_TOKENS, HEIR, HEIR_PAGES, SHARED_THEN, PLANNED, LINES };

typedef struct {
    /* the plan: `known` seats, with the fields of each, and LiveBatch.table at the plan, of `then_seats` seats */
    int64_t known, claims, in_chunks, then_seats;
    const int32_t *fields, *then;
    int64_t *claim;
    int64_t queries; /* seats with a number of query rows in query_rows; all others have one row */
    const int32_t *query_rows;
    /* the state, of `seats` seats; `is_seen` is 0 before the first call */
    int64_t seats, is_seen;
    int32_t *state;
    int64_t page_size, most_looked_at, window_left; /* window_left: -1 for all tokens */
    double token_us, lone_token_us, alone_us;
    int64_t lone_items; /* items of AloneTime in treegen.runtime.lateness; its parts are 1 / least_part */
    double layer_us, least_part;
    double most_late_us; /* see serve_requests */
} Planned;

typedef struct {
    const Planned *plan;
    const int32_t *table;
} Batch;

static inline int32_t *line(const Planned *plan, int64_t number) { return plan->state + number * plan->seats; }
static inline int32_t of_batch(const Batch *batch, int64_t line, int64_t seat) {
    return batch->table[line * batch->plan->seats + seat];
}
static inline int32_t field(const Planned *plan, int64_t number, int64_t seat) {
    return plan->fields[number * plan->known + seat];
}

static inline int32_t at_plan(const Planned *plan, int64_t line, int64_t seat) {
    return plan->then[line * plan->then_seats + seat];
}

/* The tokens that a request reads: those in its window. */
static inline int64_t read_of(const Planned *plan, int64_t tokens) {
    return plan->window_left < 0 ? tokens : at_most(tokens, 1 + plan->window_left);
}

/* Says whether a claim holds for the requests that are now in both seats. */
int claim_holds(const Batch *batch, int64_t c);

/* Returns LateRequests.most_late_us of treegen.runtime.lateness. */
double most_late_us(const Batch *batch);
