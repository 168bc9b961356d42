/* Sharing that a plan leaves out: what treegen.ir.tree.less_sharing.without_small_shares finds. */
#include "arrays.h"
#include "batch_tables.h"

/* Marks the nodes on which sharing saves least: at most `most` tokens are read in addition without them. */
static void mark_small(const BatchTree *tree, int64_t most, char *is_small, Memory *memory) {
    const int32_t *start = of_nodes(tree, START), *stop = of_nodes(tree, STOP);
    const int32_t *lo = of_nodes(tree, RANK_LO), *hi = of_nodes(tree, RANK_HI);
    int64_t *saved = TAKE(memory, int64_t, tree->nodes), *order = TAKE(memory, int64_t, tree->nodes);
    int64_t *spare = TAKE(memory, int64_t, tree->nodes), shared = 0, again = 0;
    for (int64_t node = 0; node < tree->nodes; node++) {
        saved[node] = (int64_t)(hi[node] - lo[node] - 1) * (stop[node] - start[node]);
        is_small[node] = 0;
        if (hi[node] - lo[node] > 1) order[shared++] = node;
    }
    sort_by_key(order, spare, saved, shared);
    for (int64_t i = 0; i < shared && (again += saved[order[i]]) <= most; i++) is_small[order[i]] = 1;
}

/*
 * Changes what requests share in a copy of LiveBatch.table, of `seats` seats: less, so that at most `most` tokens are
 * read in addition. tree: of the batch as it is, in which each request has one row. Returns the number of these tokens,
 * or NO_MEMORY.
 */
int64_t share_less(const BatchTree *tree, int64_t most, int32_t *table, int64_t seats) {
    Memory memory = {malloc((3 * tree->nodes + tree->requests) * sizeof(int64_t) + tree->nodes + 8), 0};
    if (!memory.block) return NO_MEMORY;
    const int32_t *above = of_requests(tree, ABOVE), *shared = of_requests(tree, SHARED);
    const int32_t *seat = of_requests(tree, SEAT);
    const int32_t *parent = of_nodes(tree, PARENT), *end = of_nodes(tree, END);
    int64_t *tokens = TAKE(&memory, int64_t, tree->requests), again = 0;
    char *is_small = TAKE(&memory, char, tree->nodes);
    mark_small(tree, most, is_small, &memory);
    for (int64_t i = 0; i < tree->requests; i++) {
        int64_t node = parent[of_rows(tree, ROW_NODE)[i]];
        while (node >= 0 && is_small[node]) node = parent[node];
        tokens[i] = at_most(shared[i], node < 0 ? 0 : end[node]);
        again += shared[i] - tokens[i];
    }
    for (int64_t i = 0; again && i < tree->requests; i++) {
        int64_t owner = tokens[i] ? above[i] : -1; /* the nearest that shares fewer tokens itself */
        while (owner >= 0 && tokens[owner] >= tokens[i]) owner = above[owner];
        table[B_SHARED_WITH * seats + seat[i]] = owner < 0 ? -1 : seat[owner];
        table[B_SHARED_TOKENS * seats + seat[i]] = (int32_t)tokens[i];
    }
    free(memory.block);
    return again;
}
