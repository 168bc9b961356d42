/* A plan of a running batch and its tables, in one call. */
#include "arrays.h"
#include "batch_tables.h"

/*
 * made: room for `words` words; it gets what cohort_plan makes, and behind that what item_tables makes.
 * Returns the words that both need, more or less if there is no room for them; or what either of them returns for what
 * it does not do.
 */
int64_t batch_tables(const BatchTree *tree, const Policy *policy, const Room *room, int32_t *made, int64_t words,
                     TableSizes *sizes) {
    int64_t of_plan = cohort_plan(tree, policy, made, words, sizes);
    if (of_plan <= 0) return of_plan;
    if (of_plan > words) return 3 * of_plan + 32 * tree->rows;
    int64_t of_tables = item_tables(tree, made, room, made + of_plan, words - of_plan, sizes);
    for (int64_t table = 0; table < TABLES; table++) sizes->at[table] += of_plan;
    return of_tables <= 0 ? of_tables : of_plan + of_tables;
}
