/* What a plan costs some steps after it was made: what treegen.runtime.lateness and .planned_requests count. */
#include <math.h>

#include "planned_seats.h"

/* Says whether a request has as many tokens as the plan asks for, and no more than it has room for. */
static int has_room(const Planned *plan, const Batch *batch, int64_t seat) {
    int32_t tokens = of_batch(batch, TOKENS, seat);
    return field(plan, LEAST, seat) <= tokens && tokens <= field(plan, MOST, seat);
}

/*
 * Marks the requests that the plan serves, of those that serve_requests found: without those that have another number
 * of query rows, or, unless lengths are ignored, have got too long or too short for the plan.
 */
static void mark_planned(const Planned *plan, const Batch *batch, int ignores_lengths) {
    const int32_t *same = line(plan, SAME), *other = line(plan, IS_OTHER);
    int32_t *planned = line(plan, PLANNED);
    for (int64_t seat = 0; seat < plan->seats; seat++) {
        int32_t rows = seat < plan->queries ? plan->query_rows[seat] : 1;
        int serves = (same[seat] || other[seat]) && of_batch(batch, ROWS, seat) == rows;
        planned[seat] = serves && (ignores_lengths || has_room(plan, batch, seat));
    }
    for (int64_t c = 0; c < plan->claims; c++)
        if (!same[plan->claim[OWNER * plan->claims + c]] && !claim_holds(batch, c))
            planned[plan->claim[CLAIMING * plan->claims + c]] = 0;
}

/* Finds the requests that the plan serves: `made` gets a byte for each of plan->seats seats. */
int64_t planned_requests(const Planned *plan, const int32_t *table, char *made) {
    Batch batch = {plan, table};
    mark_planned(plan, &batch, 0);
    for (int64_t seat = 0; seat < plan->seats; seat++) made[seat] = (char)line(plan, PLANNED)[seat];
    return 0;
}

/* Counts what LateRequests.late_facts of treegen.runtime.lateness counts, in its order. */
int64_t late_facts(const Planned *plan, const int32_t *table, int64_t *facts) {
    Batch batch = {plan, table};
    int64_t again = 0, longer = 0, queries = 0, alone_tokens = 0, longest = 0;
    mark_planned(plan, &batch, 0);
    for (int64_t seat = 0; seat < plan->seats; seat++) {
        int64_t tokens = of_batch(&batch, TOKENS, seat), rows = of_batch(&batch, ROWS, seat);
        int64_t read = read_of(plan, tokens), unread = tokens - read;
        int64_t shared = at_least(of_batch(&batch, SHARED_TOKENS, seat) - unread, 0);
        if (line(plan, IS_OTHER)[seat]) longer = at_least(longer, read - read_of(plan, at_plan(plan, TOKENS, seat)));
        if (line(plan, PLANNED)[seat]) {
            if (rows > 1) longer = at_least(longer, read - read_of(plan, at_plan(plan, TOKENS, seat)));
            int64_t used = at_least(line(plan, SHARED_THEN)[seat] - unread, 0);
            again += at_least(shared - used, 0);
        } else if (of_batch(&batch, ROW, seat) >= 0) {
            again += shared + (rows - 1) * read;
            alone_tokens += rows * read;
            queries += rows;
            longest = at_least(longest, read);
        }
    }
    int64_t made[] = {again, longer, queries, alone_tokens, longest};
    memcpy(facts, made, sizeof made);
    return 0;
}

/*
 * Counts how requests have grown, as RequestGrowth of treegen.runtime.lateness: those that are too short or too long,
 * or soon will be, the most tokens that one has gained, and the requests that have gained `least` tokens and a quarter
 * of what was their own.
 */
int64_t growth(const Planned *plan, const int32_t *table, int64_t short_by, int64_t least, int64_t *facts) {
    Batch batch = {plan, table};
    int64_t misfits = 0, most = 0, many = 0;
    mark_planned(plan, &batch, 1);
    for (int64_t seat = 0; seat < at_most(plan->seats, plan->then_seats); seat++) {
        int64_t tokens = of_batch(&batch, TOKENS, seat), then = at_plan(plan, TOKENS, seat);
        int64_t own = then - of_batch(&batch, SHARED_TOKENS, seat);
        int64_t rows = of_batch(&batch, ROWS, seat);
        if (!line(plan, PLANNED)[seat]) continue; /* only these are surely among the plan's seats */
        int64_t most_tokens = field(plan, MOST, seat);
        int64_t coming = rows > 1 && rows <= most_tokens - then ? rows : 0; /* that another plan has room for */
        misfits += tokens + short_by <= field(plan, LEAST, seat) || tokens + coming > most_tokens;
        if (rows > 1) continue;
        int64_t grown = tokens - (line(plan, IS_OTHER)[seat] ? at_least(line(plan, BEGUN_TOKENS)[seat], then) : then);
        most = at_least(most, grown);
        many += grown >= at_least(least, own / 4);
    }
    facts[0] = misfits;
    facts[1] = most;
    facts[2] = many;
    return 0;
}

/* AloneTime.longest_us of treegen.runtime.lateness. */
static double longest_us(const Planned *plan, int64_t tokens, int64_t queries) {
    double share = (double)queries / (double)plan->lone_items;
    double part = share > 0.5 ? ceil(share) : fmax(share, plan->least_part);
    return fmax((double)tokens * part * plan->lone_token_us - plan->layer_us, 0.0);
}

double most_late_us(const Batch *batch) {
    const Planned *plan = batch->plan;
    const int32_t *same = line(plan, SAME), *shared = line(plan, SHARED_THEN);
    int64_t alone = 0, most = 0, unused = 0, longer = 0;
    for (int64_t seat = 0; seat < plan->seats; seat++) {
        int64_t tokens = of_batch(batch, TOKENS, seat);
        int is_other = line(plan, IS_OTHER)[seat];
        if (of_batch(batch, ROW, seat) >= 0) alone += !((same[seat] || is_other) && has_room(plan, batch, seat));
        most = at_least(most, tokens);
        if (seat < plan->then_seats) unused += at_least(of_batch(batch, SHARED_TOKENS, seat) - shared[seat], 0);
        if (is_other) longer = at_least(longer, tokens - read_of(plan, at_plan(plan, TOKENS, seat)));
    }
    for (int64_t c = 0; c < plan->claims; c++) alone += !same[plan->claim[OWNER * plan->claims + c]];
    double late_us = (double)(alone * most + unused) * plan->token_us + (double)longer * plan->lone_token_us;
    return late_us + (alone ? longest_us(plan, most, alone) : 0.0);
}
