/* The words of a plan that the host copies to the device: what treegen.ir.request_tables.RequestTables.write writes. */
#include "arrays.h"
#include "batch_tables.h"

/* Places of RequestTables, and its sizes. unknown: the fields of a seat that the plan does not know. */
typedef struct {
    int64_t items, planned, running, entries, entry_indptr, read_rows, seats, claims, merge_partials, merge_indptr;
    int64_t queries, row_number, merge_number;
    int64_t copied, age, second; /* second: of the word that says where the second list of items begins */
    int64_t room_of_seats, at_once, has_queries;
    const int32_t *unknown;
} Places;

/* Writes `count` words of a table; zeros where there is none. */
static void write_or_clear(int32_t *to, const int32_t *table, int64_t count) {
    if (table)
        memcpy(to, table, count * sizeof *to);
    else
        memset(to, 0, count * sizeof *to);
}

/* Writes the tables of query rows. Where the plan has none, each request has one row. */
static void write_queries(const int32_t *made, const TableSizes *sizes, const Places *places, int32_t *words) {
    const int32_t *of_rows = made + sizes->at[ROW_NUMBER], *of_merges = made + sizes->at[MERGE_NUMBER];
    int32_t *of_seats = words + places->queries;
    for (int64_t s = 0; s < places->room_of_seats; s++) {
        of_seats[2 * s] = sizes->several && s < sizes->seats ? made[sizes->at[QUERY_ROWS] + s] : 1;
        of_seats[2 * s + 1] = 0;
    }
    for (int64_t i = 0; i < sizes->merged; i++) of_seats[2 * made[sizes->at[MERGE_ROWS] + i] + 1]++;
    write_or_clear(words + places->row_number, sizes->several ? of_rows : NULL, sizes->rows);
    write_or_clear(words + places->merge_number, sizes->several ? of_merges : NULL, sizes->merged);
}

/* made: what batch_tables made. words: those up to `copied`, in which all of these tables have room. */
int64_t write_tables(const int32_t *made, const TableSizes *sizes, const Places *places, int32_t *words) {
    const int64_t to[] = {places->planned, places->entries, places->entry_indptr, places->read_rows,
                          0, places->merge_indptr, places->merge_partials, places->seats, places->claims};
    const int64_t length[] = {sizes->items * OF_ITEM, sizes->entries * OF_ENTRY, sizes->items + 1, sizes->rows,
                              0, sizes->merged + 1, sizes->partials, 0, sizes->claims * OF_CLAIM};
    memset(words + places->items, 0, (places->running - places->items) * sizeof *words);
    for (int64_t table = 0; table < QUERY_ROWS; table++)
        memcpy(words + to[table], made + sizes->at[table], length[table] * sizeof *words);
    for (int64_t i = places->merge_indptr + sizes->merged + 1; i < places->copied; i++) words[i] = -1;
    if (places->has_queries) write_queries(made, sizes, places, words);
    int32_t *seat = words + places->seats;
    for (int64_t s = 0; s < places->room_of_seats; s++, seat += OF_SEAT)
        for (int64_t field = 0; field < OF_SEAT; field++)
            seat[field] = s < sizes->seats ? made[sizes->at[SEATS] + field * sizes->seats + s] : places->unknown[field];
    words[places->age] = 0;
    words[places->second] = sizes->items ? (int32_t)((sizes->items - 1) % places->at_once + 1) : 0;
    return 0;
}
