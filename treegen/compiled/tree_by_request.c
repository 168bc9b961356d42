/* The tree by request of a running batch: what treegen.ir.tree.live_trees makes of it. */
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

/* Room for the columns of a table, PADDING words apart. */
static void take_columns(Memory *memory, int32_t **columns, int64_t count, int64_t length) {
    int32_t *padded = TAKE(memory, int32_t, count * (length + PADDING));
    for (int64_t i = 0; i < count; i++) columns[i] = padded + i * (length + PADDING);
}

/*
 * Takes the requests of LiveBatch.table, [6, seats]. shares: whether they share what they are known to share.
 * of: gets their columns.
 */
static void take_requests(const int32_t *batch, int64_t seats, int64_t shares, int32_t **of, Memory *memory) {
    int32_t *number = TAKE(memory, int32_t, seats);
    int64_t n = 0;
    for (int64_t seat = 0; seat < seats; seat++) {
        number[seat] = -1;
        if (batch[B_ROW * seats + seat] < 0) continue;
        of[SEAT][n] = (int32_t)seat;
        number[seat] = (int32_t)n++;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t seat = of[SEAT][i], with = shares ? batch[B_SHARED_WITH * seats + seat] : -1;
        of[EPOCH][i] = batch[B_EPOCH * seats + seat];
        of[ABOVE][i] = with < 0 ? -1 : number[with];
        of[SHARED][i] = shares ? batch[B_SHARED_TOKENS * seats + seat] : 0;
        of[LENGTH][i] = batch[B_TOKENS * seats + seat];
    }
}

/* The tokens of a request that it may share: with several rows, none of those of the rows. */
static int64_t most_shared(int64_t length, int64_t queries, int64_t page_size) {
    int64_t most = queries > 1 ? at_least(length - queries, 0) : length;
    return most - most % page_size;
}

/* Leaves out the sharing of tokens of rows, where requests have several: see treegen.ir.tree.requests.of_queries. */
static void share_no_rows(int64_t n, int32_t **of, const int32_t *queries, int64_t page_size, Memory *memory) {
    const int32_t *length = of[LENGTH];
    int32_t *shared = TAKE(memory, int32_t, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t owner = of[ABOVE][i], own = most_shared(length[i], queries[i], page_size);
        shared[i] = 0;
        if (owner < 0) continue;
        int64_t others = most_shared(length[owner], queries[owner], page_size);
        shared[i] = (int32_t)at_most(of[SHARED][i], at_most(own, others));
    }
    int32_t *above = TAKE(memory, int32_t, n);
    for (int64_t i = 0; i < n; i++) { /* the nearest that shares fewer tokens itself */
        int64_t owner = shared[i] ? of[ABOVE][i] : -1;
        while (owner >= 0 && shared[owner] >= shared[i]) owner = of[ABOVE][owner];
        above[i] = (int32_t)owner;
    }
    for (int64_t i = 0; i < n; i++) {
        of[ABOVE][i] = above[i];
        of[SHARED][i] = shared[i];
        if (queries[i] > 1) of[LENGTH][i] = (int32_t)at_least(length[i], queries[i]);
    }
}

/* Adds the rows of a request, whose last node has `tokens` tokens. */
static void add_rows(int64_t node, int64_t tokens, int64_t rank, int64_t row, int64_t queries, int32_t **rows) {
    for (int64_t k = 0; k < queries; k++) {
        rows[ROW_NODE][row + k] = (int32_t)node;
        rows[SEES][row + k] = (int32_t)(tokens - queries + 1 + k);
        rows[ROW_OF_RANK][rank + k] = (int32_t)(row + k);
    }
}

/* Adds the spans of that node: all rows see the first one, and one row less each further token. Returns their end. */
static int64_t add_spans(int64_t node, int64_t tokens, int64_t rank, int64_t queries, int32_t **spans, int64_t span) {
    for (int64_t k = 0; k < queries; k++, span++) {
        int64_t end = tokens - queries + 1 + k;
        spans[NODE][span] = (int32_t)node;
        spans[START][span] = k ? (int32_t)end - 1 : 0;
        spans[STOP][span] = (int32_t)end;
        spans[RANK_LO][span] = (int32_t)(rank + k);
        spans[RANK_HI][span] = (int32_t)(rank + queries);
    }
    return span;
}

/*
 * batch: LiveBatch.table, [6, seats], with `requests` requests of `all_rows` rows together. shares: whether requests
 * share what they are known to share.
 * queries: the rows of each request; NULL where each has one.
 * made: room for the columns of rows, requests and of twice as many nodes; where some request has several rows, also
 * for those of spans, one for each of these nodes and one for each row.
 * facts: tokens of all nodes, the most nodes of a path, tokens of all paths, those that one row sees alone, and spans.
 * Returns the number of nodes, NO_MEMORY or TOO_LONG.
 */
int64_t tree_by_request(const int32_t *batch, int64_t seats, int64_t requests, int64_t all_rows, int64_t page_size,
                        int64_t shares, const int32_t *queries, int32_t *made, int64_t *facts) {
    int64_t n = requests, most_spans = queries ? 2 * n + all_rows : 0;
    Memory memory = {malloc((40 * n + 6 * all_rows + seats + 1024) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int32_t *rows[OF_ROW], *of[OF_REQUEST], *nodes[OF_NODE], *spans[OF_SPAN];
    take_columns(&memory, of, OF_REQUEST, n);
    take_requests(batch, seats, shares, of, &memory);
    if (queries) share_no_rows(n, of, queries, page_size, &memory);
    Requests all = {n, TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n),
                    TAKE(&memory, int64_t, n), TAKE(&memory, int64_t, n + 1)};
    put_in_order(&all, of[ABOVE], of[SHARED], &memory);
    const int32_t *above = of[ABOVE], *shared = of[SHARED];
    int64_t *rank = TAKE(&memory, int64_t, n + 1), *first_row = TAKE(&memory, int64_t, n + 1), count = n;
    for (int64_t i = 0; i < n; i++) {
        rank[i] = queries ? queries[all.order[i]] : 1;
        first_row[i] = queries ? queries[i] : 1;
        for (int64_t c = all.first_child[i]; c < all.first_child[i + 1]; c++)
            count += c == all.first_child[i] || shared[all.children[c]] != shared[all.children[c - 1]];
    }
    to_offsets(rank, n);
    to_offsets(first_row, n);
    take_columns(&memory, rows, OF_ROW, all_rows);
    take_columns(&memory, nodes, OF_NODE, count);
    take_columns(&memory, spans, OF_SPAN, most_spans);
    int32_t *hung = TAKE(&memory, int32_t, n), *level = TAKE(&memory, int32_t, count);
    int64_t node = 0, span = 0, tokens = 0, levels = 0, of_paths = 0, alone = 0;
    for (int64_t p = 0; p < n; p++) {
        int64_t request = all.order[p], first = shared[request], c = all.first_child[request + 1];
        int64_t behind = rank[p + 1], own = behind - rank[p];
        int32_t parent = above[request] < 0 ? -1 : hung[request];
        for (int is_tail = 0; !is_tail; node++) {
            is_tail = c == all.first_child[request];
            int64_t end, rank_hi = behind;
            if (is_tail) {
                end = at_least(of[LENGTH][request], first + 1);
                add_rows(node, end - first, rank[p], first_row[request], own, rows);
                if (queries) span = add_spans(node, end - first, rank[p], own, spans, span);
                of_paths -= own * (own - 1) / 2; /* rows but the last do not see the last tokens */
                alone += own > 1 ? 1 : end - first;
            } else { /* the sharers of the next tokens: of the last ones, the one that comes last */
                end = shared[all.children[c - 1]];
                rank_hi = rank[all.end[all.children[c - 1]]];
                for (; c > all.first_child[request] && shared[all.children[c - 1]] == end; c--)
                    hung[all.children[c - 1]] = (int32_t)node;
            }
            nodes[NODE][node] = (int32_t)node;
            nodes[START][node] = 0;
            nodes[STOP][node] = (int32_t)(end - first);
            nodes[RANK_LO][node] = (int32_t)rank[p];
            nodes[RANK_HI][node] = (int32_t)rank_hi;
            nodes[RANK_OWN][node] = (int32_t)(is_tail ? behind : rank[p]);
            nodes[OWNER][node] = of[SEAT][request];
            nodes[FIRST][node] = (int32_t)first;
            nodes[END][node] = is_tail ? 0 : (int32_t)end;
            nodes[PARENT][node] = parent;
            nodes[SLOT][node] = (int32_t)tokens;
            if (queries && !is_tail) {
                for (int64_t column = 0; column < OF_SPAN; column++) spans[column][span] = nodes[column][node];
                span++;
            }
            tokens += end - first;
            of_paths += (end - first) * (rank_hi - rank[p]);
            level[node] = parent < 0 ? 1 : level[parent] + 1;
            levels = at_least(levels, level[node]);
            parent = (int32_t)node;
            first = end;
        }
    }
    copy_columns(made, rows[0], OF_ROW, all_rows);
    made += OF_ROW * all_rows;
    copy_columns(made, of[0], OF_REQUEST, n);
    made += OF_REQUEST * n;
    copy_columns(made, nodes[0], OF_NODE, count);
    if (queries)
        for (int64_t i = 0; i < OF_SPAN; i++)
            memcpy(made + OF_NODE * count + i * span, spans[i], span * sizeof(int32_t));
    free(memory.block);
    facts[0] = tokens;
    facts[1] = levels;
    facts[2] = of_paths;
    facts[3] = alone;
    facts[4] = queries ? span : count;
    return tokens > INT32_MAX ? TOO_LONG : count;
}
