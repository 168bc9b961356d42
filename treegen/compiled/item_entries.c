/* The entries of work items: what treegen.schedule.by_request and .query_runs make of a plan's segments. */
#include "item_entries.h"

/* The number, in the run's node, of the own token of the first row that sees it; NONE for one row. */
static int64_t own_token(const Planned *plan, const ItemRows *item, const Run *run) {
    if (!plan->several.own || plan->several.own[run->node] == NONE) return NONE;
    int64_t rank = plan->row_lo[item->group] + item->begin + run->lo;
    return of_rows(plan->tree, SEES)[plan->row_of_rank[rank]] - 1;
}

int64_t write_entry(const Planned *plan, const Room *room, const ItemRows *item, const Run *run, int32_t *entry) {
    int64_t node = run->node, tokens = plan->node_tokens[node], base = of_nodes(plan->tree, FIRST)[node];
    int64_t unit = at_least((int64_t)1 << room->tile_power, room->page_size), own = own_token(plan, item, run);
    int ends_own = run->stop >= own && own != NONE, to_end = run->stop == tokens;
    int opened = ends_own || (to_end && of_nodes(plan->tree, END)[node] == 0);
    int begins_own = run->start > 0 && run->start >= own && own != NONE;
    int64_t first = begins_own ? run->start - tokens : run->start & -unit;
    int64_t end = to_end || opened ? run->stop : run->stop & -unit;
    int64_t most = begins_own ? run->stop - run->start : end - first + (opened ? room->reserve : 0);
    entry[0] = of_nodes(plan->tree, OWNER)[node];
    entry[1] = (int32_t)(begins_own ? first : base + first);
    entry[2] = (int32_t)(opened ? end - tokens : base + end);
    if (end == first && !opened) entry[1] = entry[2] = (int32_t)unit; /* nothing, at any place but 0 */
    entry[3] = (int32_t)run->lo;
    entry[4] = (int32_t)run->hi;
    if (own == NONE) return most;
    int64_t least = 0;
    if (entry[1] >= 0 && entry[2] > entry[1]) least = entry[2] + tokens - own; /* it ends before the own tokens */
    if (entry[1] > 0 && entry[2] <= 0) least = entry[1] - entry[2];
    int32_t *of_owner = &plan->several.least[plan->several.of_seat[entry[0]]];
    *of_owner = (int32_t)at_least(*of_owner, least);
    return most;
}

int64_t room_of_several(const BatchTree *tree, int64_t width) {
    return tree->queries ? (2 * tree->rows + tree->nodes + tree->requests + width) * sizeof(int32_t) + 40 : 0;
}

Several find_several(const BatchTree *tree, int64_t width, Memory *memory) {
    if (!tree->queries) return NOT_SEVERAL;
    Several of = {TAKE(memory, int32_t, tree->rows), TAKE(memory, int32_t, tree->rows), TAKE(memory, int32_t, width),
                  TAKE(memory, int32_t, tree->nodes), TAKE(memory, int32_t, tree->requests)};
    for (int64_t node = 0; node < tree->nodes; node++) of.own[node] = NONE;
    for (int64_t i = 0, row = 0; i < tree->requests; i++) {
        int32_t queries = tree->queries[i], tail = of_rows(tree, ROW_NODE)[row], before = of_nodes(tree, FIRST)[tail];
        if (queries > 1) of.own[tail] = of_nodes(tree, STOP)[tail] - queries;
        of.least[i] = queries > 1 && before > 0 ? before + queries : 0;
        if (tree->least) of.least[i] = (int32_t)at_least(of.least[i], tree->least[i]);
        of.of_seat[of_requests(tree, SEAT)[i]] = (int32_t)i;
        for (int32_t k = 0; k < queries; k++, row++) {
            of.request[row] = (int32_t)i;
            of.number[row] = k;
        }
    }
    return of;
}
