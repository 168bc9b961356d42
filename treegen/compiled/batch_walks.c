/* The walks of a batch's tree: what treegen.search.path_cuts, .cohort_counts and .cohort_sums find. */
#include "arrays.h"
#include "batch_weights.h"
#include <math.h>

enum { START = 1, STOP, LO, HI };                 /* lines of the table of spans, after that of nodes */
enum { BIN_BITS = 19, FIRST_BIN = (127 << 4) - 1 }; /* see treegen.search.cohort_sums */

/* What spans hold: tokens, packed runs, and full tiles. */
typedef struct {
    int64_t tokens, runs, full;
} Held;

/* By rank, what the spans hold that begin before it, and those that end at or before it. */
typedef struct {
    Held *begun, *ended;
} Sums;

/* The ranks lo[i]:hi[i] below each cut of paths. is_above: by span, whether it is above all cuts. */
typedef struct {
    int64_t rows, count;
    int64_t *lo, *hi;
    char *is_above;
} Cut;

static int64_t seen(const SpannedTree *tree, int64_t node) { return tree->rank_hi[node] - tree->rank_lo[node]; }

/* The rows that see a node's parent, if the node has fewer, and any; else 0. */
static int64_t seen_above(const SpannedTree *tree, int64_t node) {
    int64_t up = tree->parent[node], rows = seen(tree, node);
    return up >= 0 && rows > 0 && rows < seen(tree, up) ? seen(tree, up) : 0;
}

/* Cuts paths below the nodes that at least `rows` rows see. */
static void cut_at(const SpannedTree *tree, int64_t rows, Cut *cut) {
    const int32_t *node = tree->of_spans, *lo = node + LO * tree->spans;
    cut->rows = rows;
    cut->count = 0;
    for (int64_t n = 0; n < tree->nodes; n++) {
        if (seen_above(tree, n) < rows || seen(tree, n) >= rows) continue;
        cut->lo[cut->count] = tree->rank_lo[n];
        cut->hi[cut->count++] = tree->rank_hi[n];
    }
    int64_t root = -1, end = 0; /* a tree with fewer rows is not cut; those of each tree have neighbouring ranks */
    for (int64_t s = 0; s < tree->spans; s++) {
        while (end <= lo[s]) {
            do root++;
            while (tree->parent[root] >= 0);
            end = tree->rank_hi[root];
        }
        cut->is_above[s] = seen(tree, node[s]) >= rows || seen(tree, root) < rows;
    }
}

/* Cuts paths at the lowest and at the highest threshold; only once if both cut the same. Returns the number of cuts. */
static int64_t find_cuts(const SpannedTree *tree, Cut *cuts) {
    int64_t low = INT64_MAX, high = 0;
    for (int64_t n = 0; n < tree->nodes; n++) {
        int64_t above = seen_above(tree, n);
        if (!above) continue;
        low = at_most(low, seen(tree, n) + 1);
        high = at_least(high, above);
    }
    if (!high) return 0;
    cut_at(tree, low, &cuts[0]);
    if (low == high) return 1;
    cut_at(tree, high, &cuts[1]);
    size_t size = cuts[0].count * sizeof(int64_t);
    int is_same = cuts[0].count == cuts[1].count && !memcmp(cuts[0].lo, cuts[1].lo, size);
    return is_same && !memcmp(cuts[0].hi, cuts[1].hi, size) ? 1 : 2;
}

static void add(Held *to, const Held *more) {
    to->tokens += more->tokens;
    to->runs += more->runs;
    to->full += more->full;
}

/* Sums over the spans of one side of a cut; over all without one. */
static void sum_by_rank(const SpannedTree *tree, const WalkFacts *facts, const char *is_above, Sums *sums) {
    const int32_t *start = tree->of_spans + START * tree->spans, *stop = start + tree->spans;
    const int32_t *lo = stop + tree->spans, *hi = lo + tree->spans;
    size_t size = (tree->rows + 1) * sizeof(Held);
    memset(sums->begun, 0, size);
    memset(sums->ended, 0, size);
    for (int64_t s = 0; s < tree->spans; s++) {
        if (is_above && !is_above[s]) continue;
        int64_t tokens = stop[s] - start[s];
        Held held = {tokens, divided_up(tokens, facts->run_tokens), tokens / facts->tile_tokens};
        add(&sums->begun[lo[s] + 1], &held);
        add(&sums->ended[hi[s]], &held);
    }
    for (int64_t rank = 0; rank < tree->rows; rank++) {
        add(&sums->begun[rank + 1], &sums->begun[rank]);
        add(&sums->ended[rank + 1], &sums->ended[rank]);
    }
}

static Held held_by(const Sums *sums, int64_t begin, int64_t end) {
    const Held *begun = &sums->begun[end], *ended = &sums->ended[begin];
    return (Held){begun->tokens - ended->tokens, begun->runs - ended->runs, begun->full - ended->full};
}

/* The cohorts of a chunk, as they come: into bins, totals, and the list of all. */
typedef struct {
    const WalkFacts *facts;
    int has_few;
    Bins *bins;
    Totals *totals;
    Walks *walks;
    int64_t *listed;
} Chunk;

static void add_to_bin(Chunk *chunk, double rows, double tokens) {
    Bins *bins = chunk->bins;
    if (chunk->has_few) {
        bins->number[bins->count] = 1;
        bins->rows[bins->count] = rows;
        bins->tokens[bins->count++] = tokens;
        return;
    }
    float rounded = (float)tokens;
    int32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    int64_t bin = at_most(at_least((bits >> BIN_BITS) - FIRST_BIN, 0), FEW - 1);
    bins->number[bin] += 1;
    bins->rows[bin] += rows;
    bins->tokens[bin] += tokens;
}

/* Adds the cohort of the ranks begin:end. upper: what it does not read of its paths; NULL if it reads all. */
static void add_cohort(Chunk *chunk, const Sums *sums, const Sums *upper, int64_t begin, int64_t end) {
    Held held = held_by(sums, begin, end);
    if (upper) {
        Held above = held_by(upper, begin, end);
        held = (Held){held.tokens - above.tokens, held.runs - above.runs, held.full - above.full};
    }
    double tokens = (double)held.tokens, full = (double)held.full, tile = (double)chunk->facts->tile_tokens;
    Totals *totals = chunk->totals;
    totals->tokens += tokens;
    totals->cohorts += held.tokens > 0;
    totals->full += full;
    totals->by_run += ceil((double)held.runs * ((double)chunk->facts->run_tokens / tile) - full);
    totals->by_token += ceil(tokens / tile - full);
    totals->longest = tokens > totals->longest ? tokens : totals->longest;
    if (held.tokens > 0) chunk->walks->cohorts[(*chunk->listed)++] = held.tokens;
    add_to_bin(chunk, (double)(end - begin), tokens);
}

/* Leaves out empty bins, and divides tokens by the number of cohorts. */
static void close_bins(Bins *bins) {
    bins->count = 0;
    for (int64_t bin = 0; bin < FEW; bin++) {
        if (bins->number[bin] == 0) continue;
        int64_t to = bins->count++;
        bins->number[to] = bins->number[bin];
        bins->rows[to] = bins->rows[bin];
        bins->tokens[to] = bins->tokens[bin] / bins->number[bin];
    }
}

/* Adds the cohorts of `rows` ranks of each range lo[i]:hi[i]. */
static void add_chunk(Chunk *chunk, const Sums *sums, const Sums *upper, const int64_t *lo, const int64_t *hi,
                      int64_t ranges, int64_t rows) {
    int64_t cohorts = 0;
    for (int64_t i = 0; i < ranges; i++) cohorts += divided_up(hi[i] - lo[i], rows);
    chunk->has_few = cohorts <= FEW;
    chunk->bins->count = 0;
    if (!chunk->has_few) memset(chunk->bins, 0, sizeof *chunk->bins);
    for (int64_t i = 0; i < ranges; i++)
        for (int64_t begin = lo[i]; begin < hi[i]; begin += rows)
            add_cohort(chunk, sums, upper, begin, at_most(begin + rows, hi[i]));
    if (!chunk->has_few) close_bins(chunk->bins);
}

int64_t find_walks(const SpannedTree *tree, const WalkFacts *facts, Walks *walks) {
    int64_t sums_size = (tree->rows + 1) * sizeof(Held), cut_size = 2 * tree->nodes * 8 + tree->spans + 8;
    Memory memory = {malloc(4 * sums_size + MOST_CUTS * cut_size + 64), 0};
    if (!memory.block) return NO_MEMORY;
    Sums every = {TAKE(&memory, Held, tree->rows + 1), TAKE(&memory, Held, tree->rows + 1)};
    Sums upper = {TAKE(&memory, Held, tree->rows + 1), TAKE(&memory, Held, tree->rows + 1)};
    Cut cuts[MOST_CUTS];
    for (int64_t c = 0; c < MOST_CUTS; c++) {
        cuts[c].lo = TAKE(&memory, int64_t, tree->nodes);
        cuts[c].hi = TAKE(&memory, int64_t, tree->nodes);
        cuts[c].is_above = TAKE(&memory, char, tree->spans);
    }
    const int64_t zero = 0, all = tree->rows;
    int64_t listed = 0;
    walks->cuts = find_cuts(tree, cuts);
    walks->walks = facts->whole + walks->cuts;
    memset(walks->totals, 0, sizeof walks->totals);
    sum_by_rank(tree, facts, NULL, &every);
    for (int64_t w = 0; w < walks->walks; w++) {
        int64_t rows = facts->walk_rows[w], c = w - facts->whole;
        Chunk chunk = {facts, 0, &walks->bins[w], &walks->totals[w], walks, &listed};
        walks->first[w] = listed;
        if (c < 0) {
            add_chunk(&chunk, &every, NULL, &zero, &all, 1, rows);
            continue;
        }
        sum_by_rank(tree, facts, cuts[c].is_above, &upper);
        add_chunk(&chunk, &upper, NULL, &zero, &all, 1, rows);
        chunk.bins = &walks->bins[walks->walks + c];
        add_chunk(&chunk, &every, &upper, cuts[c].lo, cuts[c].hi, cuts[c].count, rows);
        int64_t below = 0;
        for (int64_t i = 0; i < cuts[c].count; i++) below += cuts[c].hi[i] - cuts[c].lo[i];
        walks->below[c] = (double)below / (double)tree->rows;
        walks->thresholds[c] = cuts[c].rows;
    }
    walks->first[walks->walks] = listed;
    free(memory.block);
    return listed;
}
