/* The tree by request of a running batch: what treegen.ir.tree.requests.of_requests makes of it. */
#include "arrays.h"
#include "batch_tables.h"

#define TOO_LONG (-2)

/*
 * Requests in depth-first order: each one before its sharers, and of these the one that shares most first. place: of
 * each request in that order. end: of each request, the end of the places of those below it.
 */
typedef struct {
    int64_t requests;
    int64_t *order, *place, *end;
    int64_t *children, *first_child; /* by owner: the sharers, in depth-first order */
} Requests;

static void put_in_order(Requests *all, const int32_t *above, const int32_t *shared, Memory *memory) {
    int64_t n = all->requests, sharers = 0, reached = 0;
    int64_t *key = TAKE(memory, int64_t, n), *spare = TAKE(memory, int64_t, n), *next = TAKE(memory, int64_t, n);
    memset(all->first_child, 0, (n + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) {
        if (above[i] < 0) continue;
        key[i] = ((int64_t)above[i] << 32) - shared[i];
        all->children[sharers++] = i;
        all->first_child[above[i]]++;
    }
    sort_by_key(all->children, spare, key, sharers);
    to_offsets(all->first_child, n);
    memcpy(next, all->first_child, n * sizeof(int64_t));
    for (int64_t root = 0; root < n; root++) {
        if (above[root] >= 0) continue;
        int64_t at = root;
        all->order[reached++] = root;
        while (at >= 0) {
            if (next[at] < all->first_child[at + 1]) {
                at = all->children[next[at]++];
                all->order[reached++] = at;
            } else {
                at = above[at];
            }
        }
    }
    for (int64_t i = 0; i < n; i++) all->place[all->order[i]] = i;
    for (int64_t i = 0; i < n; i++) all->end[i] = all->place[i] + 1;
    for (int64_t i = n - 1; i >= 0; i--) {
        int64_t request = all->order[i], owner = above[request];
        if (owner >= 0) all->end[owner] = at_least(all->end[owner], all->end[request]);
    }
}

/*
 * batch: LiveBatch.table, [6, seats]. shares: whether requests share what they are known to share.
 * made: room for the columns of `requests` rows and, behind them, of twice as many nodes.
 * facts: tokens of all nodes, the most nodes of a path, tokens of all paths, and those that one row sees alone.
 * Returns the number of nodes, NO_MEMORY or TOO_LONG.
 */
int64_t tree_by_request(const int32_t *batch, int64_t seats, int64_t requests, int64_t shares, int32_t *made,
                        int64_t *facts) {
    int64_t n = requests;
    Memory memory = {malloc((26 * (seats + n) + 512) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int32_t *rows[OF_ROW], *nodes[OF_NODE];
    int32_t *padded_rows = TAKE(&memory, int32_t, OF_ROW * (n + PADDING));
    for (int64_t i = 0; i < OF_ROW; i++) rows[i] = padded_rows + i * (n + PADDING);
    int32_t *number = TAKE(&memory, int32_t, seats);
    for (int64_t seat = 0, i = 0; seat < seats; seat++) {
        number[seat] = -1;
        if (batch[B_ROW * seats + seat] < 0) continue;
        rows[SEAT][i] = (int32_t)seat;
        number[seat] = (int32_t)i++;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t seat = rows[SEAT][i], with = shares ? batch[B_SHARED_WITH * seats + seat] : -1;
        rows[EPOCH][i] = batch[B_EPOCH * seats + seat];
        rows[ABOVE][i] = with < 0 ? -1 : number[with];
        rows[SHARED][i] = shares ? batch[B_SHARED_TOKENS * seats + seat] : 0;
        rows[LENGTH][i] = batch[B_TOKENS * seats + seat];
    }
    Requests all = {n, TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n),
                    TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n + 1)};
    put_in_order(&all, rows[ABOVE], rows[SHARED], &memory);

    int64_t count = n;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = all.first_child[i]; c < all.first_child[i + 1]; c++)
            count += c == all.first_child[i] || rows[SHARED][all.children[c]] != rows[SHARED][all.children[c - 1]];
    int32_t *padded_nodes = TAKE(&memory, int32_t, OF_NODE * (count + PADDING));
    for (int64_t i = 0; i < OF_NODE; i++) nodes[i] = padded_nodes + i * (count + PADDING);
    int32_t *hung = TAKE(&memory, int32_t, n), *level = TAKE(&memory, int32_t, count);
    int64_t node = 0, tokens = 0, levels = 0, of_paths = 0, alone = 0;
    for (int64_t p = 0; p < n; p++) {
        int64_t request = all.order[p], first = rows[SHARED][request], c = all.first_child[request + 1];
        int32_t parent = rows[ABOVE][request] < 0 ? -1 : hung[request];
        for (int is_tail = 0; !is_tail; node++) {
            is_tail = c == all.first_child[request];
            int64_t end, rank_hi = p + 1;
            if (is_tail) {
                end = at_least(rows[LENGTH][request], first + 1);
            } else { /* the sharers of the next tokens: of the last ones, the one that comes last */
                end = rows[SHARED][all.children[c - 1]];
                rank_hi = all.end[all.children[c - 1]];
                for (; c > all.first_child[request] && rows[SHARED][all.children[c - 1]] == end; c--)
                    hung[all.children[c - 1]] = (int32_t)node;
            }
            nodes[NODE][node] = (int32_t)node;
            nodes[START][node] = 0;
            nodes[STOP][node] = (int32_t)(end - first);
            nodes[RANK_LO][node] = (int32_t)p;
            nodes[RANK_HI][node] = (int32_t)rank_hi;
            nodes[RANK_OWN][node] = (int32_t)(p + is_tail);
            nodes[OWNER][node] = rows[SEAT][request];
            nodes[FIRST][node] = (int32_t)first;
            nodes[END][node] = is_tail ? 0 : (int32_t)end;
            nodes[PARENT][node] = parent;
            nodes[SLOT][node] = (int32_t)tokens;
            tokens += end - first;
            of_paths += (end - first) * (rank_hi - p);
            alone += is_tail ? end - first : 0;
            level[node] = parent < 0 ? 1 : level[parent] + 1;
            levels = at_least(levels, level[node]);
            parent = (int32_t)node;
            first = end;
        }
        rows[ROW_NODE][request] = (int32_t)(node - 1);
        rows[SEES][request] = nodes[STOP][node - 1];
        rows[ROW_OF_RANK][p] = (int32_t)request;
    }
    copy_columns(made, padded_rows, OF_ROW, n);
    copy_columns(made + OF_ROW * n, padded_nodes, OF_NODE, count);
    free(memory.block);
    facts[0] = tokens;
    facts[1] = levels;
    facts[2] = of_paths;
    facts[3] = alone;
    return tokens > INT32_MAX ? TOO_LONG : count;
}
