/* Plans of path cohorts: what treegen.strategies.cohort and .context_cuts make of a tree by request. */
#include "arrays.h"
#include "batch_tables.h"

enum { LO = RANK_LO, HI = RANK_HI }; /* lines of the tables of nodes, of spans, and of a plan's segments */

/*
 * A plan: groups with the ranks lo:hi each, and segments of the tree, segment[indptr[g]:indptr[g + 1]] of each. A
 * segment is a span; where requests have several rows, it goes on with the spans of its node that all of the group's
 * rows see.
 */
typedef struct {
    int64_t groups;
    int64_t *lo, *hi, *indptr, *segment;
} Groups;

/*
 * Finds the nodes at which paths are cut: the first of those that fewer than `shared` rows see. Returns their number.
 * fragment: for each node 1 + the number of the cut node that it is, or is below; 0 for none. base, end: ranks.
 */
static int64_t cut_paths(const BatchTree *tree, int64_t shared, int64_t *fragment, int64_t *base, int64_t *end) {
    const int32_t *parent = of_nodes(tree, PARENT), *lo = of_nodes(tree, LO), *hi = of_nodes(tree, HI);
    int64_t cuts = 0;
    for (int64_t node = 0; node < tree->nodes; node++) {
        int64_t up = parent[node];
        fragment[node] = up < 0 ? 0 : fragment[up];
        if (shared && up >= 0 && hi[up] - lo[up] >= shared && hi[node] - lo[node] < shared) {
            fragment[node] = ++cuts;
            base[cuts] = lo[node];
            end[cuts] = hi[node];
        }
    }
    return cuts;
}

/*
 * Finds which cohorts of `rows` ranks have a segment that begins with each span: those from `from` up to `behind`.
 * first: the first cohort of each fragment.
 * Returns the number of pairs of a span and a cohort.
 */
static int64_t cohorts_of(const BatchTree *tree, int64_t rows, const int64_t *fragment, const int64_t *base,
                          const int64_t *first, int32_t *from, int32_t *behind) {
    const int32_t *node = of_spans(tree, NODE), *lo = of_spans(tree, LO), *hi = of_spans(tree, HI);
    int64_t pairs = 0;
    for (int64_t s = 0; s < tree->spans; s++) {
        int64_t own = fragment[node[s]];
        uint32_t f = (uint32_t)base[own], height = (uint32_t)rows; /* 64 bits take twice the time */
        uint32_t before = ((uint32_t)lo[s] - f) / height;
        from[s] = (int32_t)first[own] + (int32_t)before;
        behind[s] = (int32_t)first[own] + (int32_t)(((uint32_t)hi[s] - f - 1) / height) + 1;
        if (s && node[s] == node[s - 1]) /* one of the cohorts may not see the span with all rows: the first */
            behind[s] = from[s] + ((uint32_t)lo[s] > f + before * height);
        pairs += behind[s] - from[s];
    }
    return pairs;
}

/* The last span of the segment that begins with span s, of a group whose first row has this rank. */
static int64_t last_span(const BatchTree *tree, const int32_t *behind_node, int64_t s, int64_t rank) {
    if (!tree->queries) return s;
    int64_t low = s, high = behind_node[of_spans(tree, NODE)[s]] - 1;
    while (low < high) { /* fewer rows see each span than the one before it */
        int64_t middle = (low + high + 1) / 2;
        if (of_spans(tree, LO)[middle] <= rank)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/*
 * Makes the groups of treegen.strategies.groupings.by_cohort. from, behind: as of cohorts_of. base, end, first: ranks
 * and cohorts of each fragment. counts: room for a number of each of `cohorts`.
 */
static void group_rows(int64_t spans, int64_t rows, const int32_t *from, const int32_t *behind, const int64_t *base,
                       const int64_t *end, const int64_t *first, int64_t cohorts, Groups *groups, int64_t *counts) {
    memset(counts, 0, (cohorts + 1) * sizeof *counts);
    for (int64_t s = 0; s < spans; s++)
        for (int64_t c = from[s]; c < behind[s]; c++) counts[c]++;
    to_offsets(counts, cohorts);
    for (int64_t s = 0; s < spans; s++)
        for (int64_t c = from[s]; c < behind[s]; c++) groups->segment[counts[c]++] = s;
    /* counts[c] is now the end of the segments of cohort c; cohorts without any are left out */
    groups->groups = 0;
    groups->indptr[0] = 0;
    for (int64_t f = 0, c = 0; c < cohorts; c++) {
        while (first[f + 1] <= c) f++;
        if (counts[c] == groups->indptr[groups->groups]) continue;
        int64_t g = groups->groups++, begin = base[f] + (c - first[f]) * rows;
        groups->lo[g] = begin;
        groups->hi[g] = at_most(begin + rows, end[f]);
        groups->indptr[g + 1] = counts[c];
    }
}

/* Counts the segments of a part; with `out`, writes them there, in columns of `all` entries. */
static int64_t part_segments(const Groups *groups, const BatchTree *tree, const int64_t *tokens_to, int64_t g,
                             int64_t begin, int64_t end, int32_t *out, int64_t all) {
    const int32_t *node = of_spans(tree, NODE), *start = of_spans(tree, START);
    const int32_t *lo = of_spans(tree, LO), *hi = of_spans(tree, HI);
    int64_t low = groups->indptr[g], high = groups->indptr[g + 1] - 1;
    while (low < high) { /* the last segment that begins at or before `begin` */
        int64_t middle = (low + high + 1) / 2;
        if (tokens_to[middle] <= begin)
            low = middle;
        else
            high = middle - 1;
    }
    int64_t count = 0;
    for (int64_t s = low; s < groups->indptr[g + 1] && tokens_to[s] < end; s++, count++) {
        if (!out) continue;
        int64_t span = groups->segment[s], moved = start[span] - tokens_to[s];
        out[NODE * all + count] = node[span];
        out[START * all + count] = (int32_t)(at_least(begin, tokens_to[s]) + moved);
        out[STOP * all + count] = (int32_t)(at_most(end, tokens_to[s + 1]) + moved);
        out[LO * all + count] = (int32_t)(at_least(lo[span], groups->lo[g]) - groups->lo[g]);
        out[HI * all + count] = (int32_t)(at_most(hi[span], groups->hi[g]) - groups->lo[g]);
    }
    return count;
}

/*
 * Nodes of the tree are numbered in depth-first order. The spans of each are neighbours, and see the same last row.
 * made: room for `room` words; it gets the columns row_lo, row_hi and group_rows of all groups, segment_indptr, and the
 * five columns of segments. sizes: gets `groups`, `segments`, `widest` and `tokens`.
 * Returns the words that the plan needs, also if there is no room for them; NO_MEMORY; or 0 for what it does not plan:
 * too many parts, and shares out of range.
 */
int64_t cohort_plan(const BatchTree *tree, const Policy *policy, int32_t *made, int64_t room, TableSizes *sizes) {
    const int32_t *node = of_spans(tree, NODE);
    int64_t nodes = tree->nodes, spans = tree->spans, rows = policy->rows;
    Memory memory = {malloc((5 * nodes + 2 * spans + 16) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int64_t *fragment = TAKE(&memory, int64_t, nodes), *base = TAKE(&memory, int64_t, nodes + 1);
    int64_t *end = TAKE(&memory, int64_t, nodes + 1), *first = TAKE(&memory, int64_t, nodes + 2);
    base[0] = 0;
    end[0] = tree->rows;
    int64_t fragments = 1 + cut_paths(tree, policy->split_shared_rows, fragment, base, end);
    for (int64_t f = 0; f < fragments; f++) first[f] = divided_up(end[f] - base[f], rows);
    int64_t cohorts = to_offsets(first, fragments);
    int32_t *from = TAKE(&memory, int32_t, spans), *behind = TAKE(&memory, int32_t, spans);
    int32_t *behind_node = TAKE(&memory, int32_t, nodes);
    for (int64_t s = 0; s < spans; s++) behind_node[node[s]] = (int32_t)s + 1;
    int64_t pairs = cohorts_of(tree, rows, fragment, base, first, from, behind);
    Memory more = {malloc((5 * cohorts + 2 * pairs + 16) * sizeof(int64_t)), 0}, of_parts = {NULL, 0};
    if (!more.block) {
        free(memory.block);
        return NO_MEMORY;
    }
    int64_t *lo = TAKE(&more, int64_t, cohorts), *hi = TAKE(&more, int64_t, cohorts);
    Groups groups = {0, lo, hi, TAKE(&more, int64_t, cohorts + 1), TAKE(&more, int64_t, pairs)};
    int64_t *counts = TAKE(&more, int64_t, cohorts + 1);
    group_rows(spans, rows, from, behind, base, end, first, cohorts, &groups, counts);

    int64_t *tokens_to = TAKE(&more, int64_t, pairs + 1), *of_groups = TAKE(&more, int64_t, groups.groups + 1);
    tokens_to[0] = 0;
    for (int64_t g = 0; g < groups.groups; g++)
        for (int64_t s = groups.indptr[g]; s < groups.indptr[g + 1]; s++) {
            int64_t span = groups.segment[s], last = last_span(tree, behind_node, span, groups.lo[g]);
            tokens_to[s + 1] = tokens_to[s] + of_spans(tree, STOP)[last] - of_spans(tree, START)[span];
        }
    for (int64_t g = 0; g <= groups.groups; g++) of_groups[g] = tokens_to[groups.indptr[g]];
    Parts parts = {0, NULL, NULL, NULL};
    int64_t total = of_groups[groups.groups], length = policy->split ? policy->split : total + 1;
    if (policy->shares > 0) length = share_of(total, policy->shares, &policy->rules);
    int64_t count = length > 0 ? count_parts(of_groups, groups.groups, length) : policy->most_made + 1;
    int64_t parts_room = 2 * count + 2;
    if (count <= policy->most_made) of_parts.block = malloc(3 * parts_room * sizeof(int64_t));
    int64_t words = count <= policy->most_made ? NO_MEMORY : 0, segments = 0;
    if (of_parts.block) {
        parts.group = TAKE(&of_parts, int64_t, parts_room);
        parts.begin = TAKE(&of_parts, int64_t, parts_room);
        parts.end = TAKE(&of_parts, int64_t, parts_room);
        count = policy->shares > 0 ? cut_evenly(of_groups, groups.groups, policy->shares, &policy->rules, &parts)
                                   : cut_every(of_groups, groups.groups, length, &parts);
        for (int64_t i = 0; i < count; i++)
            segments += part_segments(&groups, tree, tokens_to, parts.group[i], parts.begin[i], parts.end[i], NULL, 0);
        if (count >= 0) words = 4 * count + 1 + 5 * segments;
        sizes->groups = count;
        sizes->segments = segments;
        sizes->tokens = total;
    }
    if (words > 0 && words <= room) {
        int32_t *indptr = made + 3 * count, *of_segments = indptr + count + 1;
        indptr[0] = 0;
        sizes->widest = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t g = parts.group[i];
            sizes->widest = at_least(sizes->widest, groups.hi[g] - groups.lo[g]);
            made[i] = (int32_t)groups.lo[g];
            made[count + i] = (int32_t)groups.hi[g];
            made[2 * count + i] = (int32_t)(groups.hi[g] - groups.lo[g]);
            indptr[i + 1] = indptr[i] + (int32_t)part_segments(&groups, tree, tokens_to, g, parts.begin[i], parts.end[i],
                                                               of_segments + indptr[i], segments);
        }
    }
    free(of_parts.block);
    free(more.block);
    free(memory.block);
    return words;
}
