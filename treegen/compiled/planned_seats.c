/* Which requests of a running batch a plan serves: what treegen.runtime.planned_requests and .planned_claims find. */
#include "planned_seats.h"

/* Marks seats from `first` on as those of nobody. */
static void clear_state(const Planned *plan, int64_t first) {
    for (int64_t number = 0; number < LINES; number++) {
        int32_t nothing = number == BEGUN_EPOCH || number == HEIR ? -1 : 0;
        for (int64_t seat = first; seat < plan->seats; seat++) line(plan, number)[seat] = nothing;
    }
}

/*
 * Fills the table of claims and the state of a new plan. The line SHARED_THEN gets the tokens that requests shared at
 * the plan, as owners or with them. claims: RequestSchedule.claims, of three columns.
 */
int64_t begin_requests(Planned *plan, const int32_t *claims) {
    int32_t *shared = line(plan, SHARED_THEN);
    clear_state(plan, 0);
    memcpy(shared, plan->then + SHARED_TOKENS * plan->then_seats, plan->then_seats * sizeof *shared);
    for (int64_t seat = 0; seat < plan->then_seats; seat++) {
        int32_t with = at_plan(plan, SHARED_WITH, seat), tokens = at_plan(plan, SHARED_TOKENS, seat);
        if (with >= 0) shared[with] = (int32_t)at_least(shared[with], tokens);
    }
    for (int64_t seat = 0; seat < plan->known; seat++) {
        if (field(plan, CLAIM_OWNER, seat) < 0) continue;
        for (int64_t c = field(plan, FURTHER, seat) - 1; c < field(plan, END, seat); c++) {
            plan->claim[CLAIMING * plan->claims + c] = seat;
            plan->claim[OWNER * plan->claims + c] = claims[3 * c];
            plan->claim[PAGES * plan->claims + c] = claims[3 * c + 2];
            line(plan, IS_OWNER)[claims[3 * c]] = 1;
        }
    }
    return 0;
}

/* Goes on with a state of more seats. */
int64_t widen_state(Planned *plan, int32_t *state, int64_t seats) {
    Planned wider = *plan;
    wider.state = state;
    wider.seats = seats;
    wider.is_seen = 0;
    clear_state(&wider, plan->seats);
    for (int64_t number = 0; number < LINES; number++)
        memcpy(line(&wider, number), line(plan, number), plan->seats * sizeof *state);
    *plan = wider;
    return 0;
}

/* Says whether the plan has a request in this seat. */
static int is_known(const Planned *plan, int64_t seat) {
    return seat < plan->known && field(plan, KNOWN_EPOCH, seat) != -1;
}

/* The owner of the last of a seat's first `tokens` tokens, as treegen.ir.seat_sharing.owner_of. */
static int64_t owner_of(const Batch *batch, int64_t seat, int64_t tokens) {
    if (!tokens) return -1;
    while (of_batch(batch, SHARED_TOKENS, seat) >= tokens) seat = of_batch(batch, SHARED_WITH, seat);
    return seat;
}

/* Says whether two requests begin with the same first pages, as far as is known. */
static int are_alike(const Batch *batch, int64_t seat, int64_t other, int64_t pages) {
    int64_t tokens = pages * batch->plan->page_size;
    if (of_batch(batch, TOKENS, seat) < tokens || of_batch(batch, TOKENS, other) < tokens) return 0;
    return owner_of(batch, seat, tokens) == owner_of(batch, other, tokens);
}

/* The first of the claims of a seat; `end` gets the end of them. */
static int64_t claims_of(const Planned *plan, int64_t seat, int64_t *end) {
    *end = 0;
    if (field(plan, CLAIM_OWNER, seat) < 0) return 0;
    *end = field(plan, END, seat);
    return field(plan, FURTHER, seat) - 1;
}

/* Says whether a request that has come into this seat shares what the plan assumes of it. */
static int claims_hold(const Batch *batch, int64_t seat) {
    const Planned *plan = batch->plan;
    const int32_t *heir = line(plan, HEIR);
    int64_t end;
    for (int64_t c = claims_of(plan, seat, &end); c < end; c++) {
        int64_t owner = plan->claim[OWNER * plan->claims + c];
        if (heir[owner] >= 0 || !are_alike(batch, seat, owner, plan->claim[PAGES * plan->claims + c])) return 0;
    }
    return heir[seat] < 0 || are_alike(batch, seat, heir[seat], line(plan, HEIR_PAGES)[seat]);
}

static int is_faster_alone(const Planned *plan, int64_t seat, int64_t tokens, int64_t shared) {
    int64_t longer = read_of(plan, tokens) - read_of(plan, at_plan(plan, TOKENS, seat));
    int64_t again = at_least(shared - tokens + read_of(plan, tokens), 0);
    return (double)longer * plan->lone_token_us > plan->alone_us + (double)again * plan->token_us;
}

/* Looks at a request that the plan was not made for. Returns whether it is served alone, or shares more. */
static int look_again(const Batch *batch, int64_t seat) {
    const Planned *plan = batch->plan;
    int32_t epoch = of_batch(batch, EPOCH, seat), shared = of_batch(batch, SHARED_TOKENS, seat);
    if (line(plan, BEGUN_EPOCH)[seat] != epoch) {
        line(plan, BEGUN_EPOCH)[seat] = epoch;
        line(plan, BEGUN_TOKENS)[seat] = of_batch(batch, TOKENS, seat);
    }
    int32_t tokens = line(plan, BEGUN_TOKENS)[seat];
    int fits = field(plan, LEAST, seat) <= tokens && tokens <= field(plan, MOST, seat) &&
               !is_faster_alone(plan, seat, tokens, shared) && claims_hold(batch, seat);
    line(plan, IS_OTHER)[seat] = fits;
    if (!fits) return 1;
    int64_t end;
    claims_of(plan, seat, &end);
    return shared > (end ? plan->claim[PAGES * plan->claims + end - 1] * plan->page_size : 0);
}

/* Marks the arrived requests that the plan serves only if they share pages with the one in this seat. */
static void mark_relying(const Planned *plan, int64_t owner) {
    int32_t *again = line(plan, AGAIN);
    const int32_t *arrived = line(plan, HAS_ARRIVED), *heir = line(plan, HEIR);
    for (int64_t c = 0; c < plan->claims; c++)
        if (plan->claim[OWNER * plan->claims + c] == owner) {
            int64_t seat = plan->claim[CLAIMING * plan->claims + c];
            again[seat] |= arrived[seat];
        }
    for (int64_t seat = 0; seat < plan->known; seat++)
        if (heir[seat] == owner) again[seat] |= arrived[seat];
}

/* Finds which seats have changed, and looks at them. Returns whether more may be alone, or share more, than before. */
static int look_at_changes(Planned *plan, const Batch *batch) {
    int32_t *same = line(plan, SAME), *other = line(plan, IS_OTHER), *arrived = line(plan, HAS_ARRIVED);
    int32_t *ended = line(plan, HAS_ENDED), *again = line(plan, AGAIN);
    int64_t seats = plan->seats, new_ones = 0;
    int worse = !plan->is_seen, has_arrived = 0, is_first = !plan->is_seen;
    if (is_first) {
        memset(other, 0, seats * sizeof *other);
        memset(arrived, 0, seats * sizeof *arrived);
    }
    memset(again, 0, seats * sizeof *again);
    for (int64_t seat = 0; seat < seats; seat++) has_arrived |= arrived[seat];
    for (int64_t seat = 0; seat < seats; seat++) {
        int runs = of_batch(batch, ROW, seat) >= 0, known = is_known(plan, seat), changed = 0;
        int is_same = runs && known && of_batch(batch, EPOCH, seat) == field(plan, KNOWN_EPOCH, seat);
        for (int64_t i = 0; i < 4; i++) {
            changed |= line(plan, SEEN + i)[seat] != of_batch(batch, i, seat);
            line(plan, SEEN + i)[seat] = of_batch(batch, i, seat);
        }
        if (is_first) {
            same[seat] = is_same;
            changed = known && !is_same;
        }
        if (!changed) continue;
        if (!known) {
            worse |= runs;
            continue;
        }
        same[seat] = is_same;
        if (!is_same && line(plan, IS_OWNER)[seat]) ended[seat] |= 2; /* 2: by this call */
        if (runs && !is_same)
            again[seat] = 2;
        else
            arrived[seat] = other[seat] = 0;
    }
    plan->is_seen = 1;
    for (int64_t seat = 0; seat < seats && has_arrived; seat++)
        if (ended[seat] & 2) mark_relying(plan, seat);
    for (int64_t seat = 0; seat < seats; seat++) {
        if (again[seat]) {
            arrived[seat] = 1;
            new_ones++;
            if (line(plan, IS_OWNER)[seat]) ended[seat] = 1;
        }
        ended[seat] = ended[seat] != 0;
    }
    if (new_ones > plan->most_looked_at) { /* the plan serves none of them */
        memset(other, 0, seats * sizeof *other);
        plan->is_seen = 0;
        return 1;
    }
    for (int64_t seat = 0; seat < seats; seat++)
        if (again[seat]) worse |= look_again(batch, seat);
    return worse;
}

int claim_holds(const Batch *batch, int64_t c) {
    const Planned *plan = batch->plan;
    const int64_t *claim = plan->claim + c;
    return are_alike(batch, claim[CLAIMING * plan->claims], claim[OWNER * plan->claims], claim[PAGES * plan->claims]);
}

/* Makes that request the heir of an ended one that shares most with it, of several the one with the last claim. */
static void pass_on(const Planned *plan, int64_t ended, int64_t last_claim) {
    int32_t *heir = line(plan, HEIR), *pages = line(plan, HEIR_PAGES);
    int32_t to = (int32_t)plan->claim[CLAIMING * plan->claims + last_claim];
    int32_t common = (int32_t)plan->claim[PAGES * plan->claims + last_claim];
    for (int64_t c = 0; c < plan->claims; c++) {
        int64_t *claim = plan->claim + c;
        if (claim[OWNER * plan->claims] == ended && claim[PAGES * plan->claims] <= common)
            claim[OWNER * plan->claims] = to;
    }
    for (int64_t seat = 0; seat < plan->known; seat++)
        if (heir[seat] == ended) {
            heir[seat] = to;
            pages[seat] = (int32_t)at_most(pages[seat], common);
        }
    heir[ended] = to;
    pages[ended] = common;
    line(plan, IS_OWNER)[to] = 1;
}

/* Lets heirs take over from ended requests. Returns what look_at_changes does. */
static int let_inherit(const Planned *plan, const Batch *batch) {
    const int32_t *same = line(plan, SAME);
    int32_t *ended = line(plan, HAS_ENDED), *again = line(plan, AGAIN);
    int worse = 0;
    memset(again, 0, plan->seats * sizeof *again);
    for (int64_t owner = 0; owner < plan->known; owner++) {
        if (!ended[owner]) continue;
        ended[owner] = 0;
        if (plan->in_chunks) continue;
        int64_t lost = 0, last = -1;
        for (int64_t c = 0; c < plan->claims; c++) {
            const int64_t *claim = plan->claim + c;
            if (claim[OWNER * plan->claims] != owner || !same[claim[CLAIMING * plan->claims]]) continue;
            lost += !claim_holds(batch, c);
            if (last < 0 || claim[PAGES * plan->claims] >= plan->claim[PAGES * plan->claims + last]) last = c;
        }
        worse |= lost > 0;
        if (lost <= line(plan, IS_OTHER)[owner]) continue;
        again[owner] = line(plan, HAS_ARRIVED)[owner];
        mark_relying(plan, owner);
        pass_on(plan, owner, last);
    }
    for (int64_t seat = 0; seat < plan->seats; seat++)
        if (again[seat]) worse |= look_again(batch, seat);
    return worse;
}

/* Writes the running requests as kernels are to see them. */
static void write_running(const Batch *batch, int32_t *made) {
    const Planned *plan = batch->plan;
    int64_t seats = plan->seats;
    memcpy(made, batch->table, 2 * seats * sizeof *made);
    for (int64_t seat = 0; seat < seats; seat++) {
        int32_t heir = line(plan, HEIR)[seat];
        if (line(plan, IS_OTHER)[seat]) made[seats + seat] = field(plan, KNOWN_EPOCH, seat);
        made[2 * seats + seat] = heir < 0 ? -1 : of_batch(batch, ROW, heir);
        made[3 * seats + seat] = heir < 0 ? 0 : line(plan, HEIR_PAGES)[seat];
    }
}

/*
 * Finds which requests of a later batch the plan serves; with `inherits`, after heirs have taken over from those that
 * have ended. The lines SAME and IS_OTHER say by seat whether the planned request runs there, or another one that the
 * plan serves. plan->most_late_us gets the most microseconds that a layer loses because the plan is late.
 * table: LiveBatch.table, of plan->seats seats.
 * running: gets the running requests as kernels are to see them, [RUNNING_FIELDS, plan->seats].
 * Returns whether more requests may be alone, or share more, than at the last call.
 */
int64_t serve_requests(Planned *plan, const int32_t *table, int64_t inherits, int32_t *running) {
    Batch batch = {plan, table};
    int worse = look_at_changes(plan, &batch);
    if (inherits) worse |= let_inherit(plan, &batch);
    write_running(&batch, running);
    plan->most_late_us = most_late_us(&batch);
    return worse;
}
