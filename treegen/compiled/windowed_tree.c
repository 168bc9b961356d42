/* A tree by request without what no window reaches: what treegen.ir.positions.windowed_requests makes of it. */
#include "arrays.h"
#include "batch_tables.h"

/*
 * By node: the tokens that it loses, the position of its first token after that, and its number among the nodes that
 * are left, -1 if it is not.
 */
typedef struct {
    int32_t *left, *begin, *number;
} Cuts;

/* Finds what each node loses. Returns the number of nodes that lose tokens. */
static int64_t find_cuts(const BatchTree *tree, int64_t window_left, int64_t unit, Cuts *cuts, Memory *memory) {
    const int32_t *first = of_nodes(tree, FIRST), *parent = of_nodes(tree, PARENT);
    const int32_t *lo = of_nodes(tree, RANK_LO), *own = of_nodes(tree, RANK_OWN);
    const int32_t *row_of_rank = of_rows(tree, ROW_OF_RANK), *sees = of_rows(tree, SEES);
    int64_t *least = TAKE(memory, int64_t, tree->nodes), cut = 0; /* the first position of a row at or below */
    for (int64_t node = 0; node < tree->nodes; node++) least[node] = INT64_MAX / 2;
    for (int64_t node = tree->nodes - 1; node >= 0; node--) { /* parents come before their children */
        for (int64_t rank = lo[node]; rank < own[node]; rank++)
            least[node] = at_most(least[node], (int64_t)first[node] + sees[row_of_rank[rank]] - 1);
        if (parent[node] >= 0) least[parent[node]] = at_most(least[parent[node]], least[node]);
    }
    for (int64_t node = 0; node < tree->nodes; node++) {
        int64_t tokens = of_nodes(tree, STOP)[node];
        int64_t left = at_most(at_least(least[node] - window_left - first[node], 0), tokens);
        if (left < tokens) left -= left % unit;
        cuts->left[node] = (int32_t)left;
        cuts->begin[node] = (int32_t)(first[node] + left);
        cut += left > 0;
    }
    return cut;
}

/* Writes the columns of the nodes that are left. Returns the most nodes of a path. */
static int64_t write_nodes(const BatchTree *tree, const Cuts *cuts, int64_t nodes, int32_t *made, Memory *memory) {
    const int32_t *parent = of_nodes(tree, PARENT), *stop = of_nodes(tree, STOP);
    int32_t *above = TAKE(memory, int32_t, tree->nodes), *level = TAKE(memory, int32_t, tree->nodes);
    int64_t slot = 0, levels = 0;
    for (int64_t node = 0; node < tree->nodes; node++) {
        int32_t up = parent[node], number = cuts->number[node];
        above[node] = up < 0 || cuts->number[up] >= 0 ? up : above[up]; /* the nearest that is left */
        if (number < 0) continue;
        up = above[node];
        level[node] = up < 0 ? 1 : level[up] + 1;
        levels = at_least(levels, level[node]);
        int32_t *to = made + number;
        to[NODE * nodes] = number;
        to[START * nodes] = 0;
        to[STOP * nodes] = stop[node] - cuts->left[node];
        to[FIRST * nodes] = cuts->begin[node];
        to[PARENT * nodes] = up < 0 ? -1 : cuts->number[up];
        to[SLOT * nodes] = (int32_t)slot;
        slot += stop[node] - cuts->left[node];
        const int32_t same[] = {RANK_LO, RANK_HI, OWNER, END, RANK_OWN};
        for (int64_t i = 0; i < 5; i++) to[same[i] * nodes] = of_nodes(tree, same[i])[node];
    }
    return levels;
}

/* Writes the spans that are left, one after another, each of OF_SPAN words. Returns their number. */
static int64_t find_spans(const BatchTree *tree, const Cuts *cuts, int32_t *spans) {
    int64_t count = 0;
    for (int64_t s = 0; s < tree->spans; s++) {
        int32_t node = of_spans(tree, NODE)[s], left = cuts->left[node], *span = spans + OF_SPAN * count;
        if (of_spans(tree, STOP)[s] <= left) continue;
        span[NODE] = cuts->number[node];
        span[START] = (int32_t)at_least(of_spans(tree, START)[s] - left, 0);
        span[STOP] = of_spans(tree, STOP)[s] - left;
        span[RANK_LO] = of_spans(tree, RANK_LO)[s];
        span[RANK_HI] = of_spans(tree, RANK_HI)[s];
        count++;
    }
    return count;
}

/*
 * Finds for each request the fewest tokens with which its windows reach no token that is left out, 0 for any number.
 * The lowest node of its path that loses tokens decides.
 */
static void find_least(const BatchTree *tree, const Cuts *cuts, int64_t window_left, int32_t *least, Memory *memory) {
    const int32_t *parent = of_nodes(tree, PARENT), *row_node = of_rows(tree, ROW_NODE);
    int32_t *begin = TAKE(memory, int32_t, tree->nodes); /* of that node */
    for (int64_t node = 0; node < tree->nodes; node++) {
        int32_t above = parent[node] < 0 ? 0 : begin[parent[node]];
        begin[node] = cuts->left[node] ? cuts->begin[node] : above;
    }
    for (int64_t i = 0, row = 0; i < tree->requests; i++) {
        int64_t queries = tree->queries ? tree->queries[i] : 1, first = begin[row_node[row]];
        least[i] = first ? (int32_t)(first + window_left + queries) : 0;
        row += queries;
    }
}

/*
 * window_left, unit: see windowed_requests. made: room for as many words as the tree has. least: gets RequestKV.least.
 * facts: as of tree_by_request.
 * Returns the number of nodes; 0 if nothing is left out, with nothing written; or NO_MEMORY.
 */
int64_t windowed_tree(const BatchTree *tree, int64_t window_left, int64_t unit, int32_t *made, int32_t *least,
                      int64_t *facts) {
    Memory memory = {malloc((8 * tree->nodes + 3 * tree->spans + 64) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int64_t n = tree->nodes, nodes = 0;
    Cuts cuts = {TAKE(&memory, int32_t, n), TAKE(&memory, int32_t, n), TAKE(&memory, int32_t, n)};
    int64_t cut = find_cuts(tree, window_left, unit, &cuts, &memory);
    for (int64_t node = 0; node < n; node++)
        cuts.number[node] = cuts.left[node] < of_nodes(tree, STOP)[node] ? (int32_t)nodes++ : -1;
    if (cut) {
        int64_t requests = tree->requests;
        find_least(tree, &cuts, window_left, least, &memory);
        memcpy(made, tree->words, (OF_ROW * tree->rows + OF_REQUEST * requests) * sizeof *made);
        for (int64_t row = 0; row < tree->rows; row++) { /* a row sees its last token, so its node is left */
            int32_t node = of_rows(tree, ROW_NODE)[row];
            made[ROW_NODE * tree->rows + row] = cuts.number[node];
            made[SEES * tree->rows + row] -= cuts.left[node];
        }
        int32_t *of_node = made + OF_ROW * tree->rows + OF_REQUEST * requests, *spans = of_node + OF_NODE * nodes;
        memset(facts, 0, 5 * sizeof *facts);
        facts[1] = write_nodes(tree, &cuts, nodes, of_node, &memory);
        int32_t *span = TAKE(&memory, int32_t, OF_SPAN * tree->spans);
        facts[4] = find_spans(tree, &cuts, span);
        for (int64_t s = 0; s < facts[4]; s++, span += OF_SPAN) {
            int64_t tokens = span[STOP] - span[START], rows = span[RANK_HI] - span[RANK_LO];
            facts[0] += tokens;
            facts[2] += tokens * rows;
            facts[3] += rows == 1 ? tokens : 0;
            for (int64_t column = 0; tree->queries && column < OF_SPAN; column++)
                spans[column * facts[4] + s] = span[column];
        }
    }
    free(memory.block);
    return cut ? nodes : 0;
}
