/* A tree by request, what is planned for it, and the functions that do so. */
#pragma once
#include "context_cuts.h"
#include <stdint.h>

enum { B_ROW, B_EPOCH, B_SHARED_WITH, B_SHARED_TOKENS, B_TOKENS, B_ROWS }; /* lines of LiveBatch.table */
enum { ROW_NODE, SEES, ROW_OF_RANK, OF_ROW };
enum { SEAT, EPOCH, ABOVE, SHARED, LENGTH, OF_REQUEST };
enum { NODE, START, STOP, RANK_LO, RANK_HI, OF_SPAN };
enum { OWNER = OF_SPAN, FIRST, END, PARENT, RANK_OWN, SLOT, OF_NODE }; /* of nodes, after the columns of spans */

/*
 * A tree. words: the columns of its rows, requests and nodes, as treegen.ir.tree.requests.of_columns takes them, and
 * behind these the columns of its spans, unless each node is one. queries: the rows of each request; NULL where each
 * has one. least: RequestKV.least, NULL for none.
 */
typedef struct {
    int64_t requests, rows, nodes, spans;
    const int32_t *words, *queries, *least;
} BatchTree;

static inline const int32_t *of_rows(const BatchTree *tree, int64_t column) {
    return tree->words + column * tree->rows;
}
static inline const int32_t *of_requests(const BatchTree *tree, int64_t column) {
    return tree->words + OF_ROW * tree->rows + column * tree->requests;
}
static inline const int32_t *of_nodes(const BatchTree *tree, int64_t column) {
    return of_requests(tree, OF_REQUEST) + column * tree->nodes;
}
static inline const int32_t *of_spans(const BatchTree *tree, int64_t column) {
    return tree->queries ? of_nodes(tree, OF_NODE) + column * tree->spans : of_nodes(tree, column);
}

/* Options of treegen.strategies.cohort.Cohort, 0 for none. */
typedef struct {
    int64_t rows, split_shared_rows, split; /* rows: of a group */
    double shares;
    ShareRules rules;
    int64_t most_made; /* parts */
} Policy;

/* treegen.schedule.by_request.ItemRoom, with the rows of a tile; tokens of tiles and packed runs as powers of two. */
typedef struct {
    int64_t height, tile_power, run_power, page_size, reserve;
    int64_t causal; /* whether the kernel's mask hides the tokens behind each row */
    const int32_t *unknown; /* the fields of a seat that the plan does not know */
} Room;

enum { ITEM_TABLE, ENTRIES, ENTRY_INDPTR, ROW_TABLE, MERGE_ROWS, MERGE_INDPTR, MERGE_PARTIALS, SEATS, CLAIMS };
enum { QUERY_ROWS = CLAIMS + 1, ROW_NUMBER, MERGE_NUMBER, TABLES }; /* empty where each request has one row */
/*
 * The sizes of a plan and its tables. widest: the most rows of a group. seats: those that are described. at: where the
 * tables begin. several: whether some request has several rows. tokens: those that groups read.
 */
typedef struct {
    int64_t groups, segments, widest, tokens;
    int64_t tiles, runs, items, entries, rows, merged, partials, seats, claims, several;
    int64_t at[TABLES];
} TableSizes;

enum { OF_ITEM = 8, OF_ENTRY = 5, OF_SEAT = 10, OF_CLAIM = 3 }; /* words of an entry of some tables */

int64_t cohort_plan(const BatchTree *tree, const Policy *policy, int32_t *made, int64_t room, TableSizes *sizes);
int64_t item_tables(const BatchTree *tree, const int32_t *plan, const Room *room, int32_t *made, int64_t words,
                    TableSizes *sizes);
