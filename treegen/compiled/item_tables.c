/* Tables of work items by request: what treegen.schedule.by_request and .query_runs make of plans of cohorts. */
#include "arrays.h"
#include "batch_tables.h"
#include "item_entries.h"

/* Work items: rows begin:begin + rows of a group, their tokens, the first KV slot, and the number of entries. */
typedef struct {
    int64_t items;
    int64_t *group, *begin, *rows, *tokens, *slot, *entries;
} Items;

/* Where the tables lie in `made`, one after another. */
typedef struct {
    int32_t *items, *entries, *entry_indptr, *rows, *merge_rows, *merge_indptr, *merge_partials, *seats, *claims;
    int32_t *query_rows, *row_number, *merge_number;
} Tables;

/* Cuts groups into items of at most room->height rows that read anything. Returns the entries of all items. */
static int64_t cut_items(const Planned *plan, const Room *room, Items *made) {
    int64_t all = 0;
    made->items = 0;
    for (int64_t g = 0; g < plan->groups; g++)
        for (int64_t begin = 0; begin < plan->group_rows[g]; begin += room->height) {
            int64_t i = made->items, tokens = 0, entries = 0;
            ItemRows item = rows_of(plan, g, begin, at_most(room->height, plan->group_rows[g] - begin));
            Run run;
            for (int64_t s = plan->segment_indptr[g]; s < item.behind;) {
                s = next_run(plan, room, &item, s, &run);
                if (run.start == run.stop) break;
                if (!entries++) made->slot[i] = plan->node_slots[run.node] + run.start;
                tokens += run.stop - run.start;
            }
            if (!entries) continue;
            made->group[i] = g;
            made->begin[i] = begin;
            made->rows[i] = item.rows;
            made->tokens[i] = tokens;
            made->entries[i] = entries;
            made->items++;
            all += entries;
        }
    return all;
}

/* Writes items in launch order, with the room of each, and their entries. */
static void write_items(const Planned *plan, const Room *room, const Items *items, const int64_t *order,
                        Tables *tables, TableSizes *sizes) {
    int64_t tokens = (int64_t)1 << room->tile_power, run_tokens = (int64_t)1 << room->run_power;
    int64_t tiles = 0, runs = 0, entries = 0;
    tables->entry_indptr[0] = 0;
    for (int64_t k = 0; k < items->items; k++) {
        int64_t i = order[k], g = items->group[i], item_runs = 0;
        ItemRows of_item = rows_of(plan, g, items->begin[i], items->rows[i]);
        Run run;
        int32_t *item = tables->items + k * OF_ITEM;
        memset(item, 0, OF_ITEM * sizeof *item);
        item[0] = (int32_t)(plan->row_lo[g] + of_item.begin);
        item[1] = (int32_t)of_item.rows;
        item[2] = (int32_t)tiles;
        item[4] = (int32_t)runs;
        item[6] = -1;
        item[7] = (int32_t)g;
        for (int64_t s = plan->segment_indptr[g]; s < of_item.behind;) {
            s = next_run(plan, room, &of_item, s, &run);
            if (run.start == run.stop) break;
            int64_t most = write_entry(plan, room, &of_item, &run, tables->entries + entries++ * OF_ENTRY);
            tiles += most >> room->tile_power;
            item_runs += (at_most(most, tokens - 1) + run_tokens - 1) >> room->run_power;
        }
        runs += (item_runs + tokens / run_tokens - 1) & -(tokens / run_tokens);
        tables->entry_indptr[k + 1] = (int32_t)entries;
    }
    sizes->tiles = tiles;
    sizes->runs = runs;
}

/*
 * Finds the items that write partials: one of their rows has another item, too. of_row: the partials of each row.
 * Returns the number of all partials.
 */
static int64_t count_partials(const Planned *plan, const Items *items, int64_t *of_row, char *is_partial) {
    int64_t partials = 0;
    memset(of_row, 0, plan->tree->rows * sizeof *of_row);
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        for (int64_t r = 0; r < items->rows[i]; r++) of_row[row[r]]++;
    }
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        is_partial[i] = 0;
        for (int64_t r = 0; r < items->rows[i]; r++) is_partial[i] |= of_row[row[r]] > 1;
    }
    memset(of_row, 0, plan->tree->rows * sizeof *of_row);
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        if (!is_partial[i]) continue;
        for (int64_t r = 0; r < items->rows[i]; r++) of_row[row[r]]++;
        partials += items->rows[i];
    }
    return partials;
}

/* Writes merge lists, and partial slots into the items. of_row: as of count_partials; it is used up. */
static void write_merges(const Planned *plan, const Items *items, const int64_t *order, const char *is_partial,
                         int64_t *of_row, Tables *tables) {
    int64_t merged = 0, slots = 0;
    tables->merge_indptr[0] = 0;
    for (int64_t i = 0; i < plan->tree->rows; i++) {
        if (!of_row[i]) continue;
        tables->merge_rows[merged] = (int32_t)i;
        tables->merge_indptr[merged + 1] = tables->merge_indptr[merged] + (int32_t)of_row[i];
        merged++;
    }
    to_offsets(of_row, plan->tree->rows);
    for (int64_t k = 0; k < items->items; k++) {
        int64_t i = order[k];
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        if (!is_partial[i]) continue;
        tables->items[k * OF_ITEM + 6] = (int32_t)slots;
        for (int64_t r = 0; r < items->rows[i]; r++) tables->merge_partials[of_row[row[r]]++] = (int32_t)slots++;
    }
}

/* Counts the claims of a request; with `claims`, writes them there, by rising pages. */
static inline int64_t write_claims(const Planned *plan, const Room *room, int64_t request, int32_t *claims) {
    const int32_t *above = plan->above, *shared = plan->shared;
    int64_t count = 0, end = shared[request];
    for (int64_t owner = above[request]; owner >= 0; count++) {
        if (shared[owner] == 0) {
            count++;
            break;
        }
        owner = above[owner];
    }
    if (!claims) return count;
    int64_t owner = above[request];
    for (int64_t c = count - 1; c >= 0; c--) {
        claims[c * OF_CLAIM] = plan->seat[owner];
        claims[c * OF_CLAIM + 1] = (int32_t)(shared[owner] / room->page_size);
        claims[c * OF_CLAIM + 2] = (int32_t)(end / room->page_size);
        end = shared[owner];
        owner = above[owner];
    }
    return count;
}

/* Writes the lists of rows, where numbers of rows become seats, and where each request finds its first rows. */
static void write_lists(const Planned *plan, int64_t merged, int32_t *first_row, int32_t *first_merge,
                        Tables *tables) {
    const int32_t *seat = plan->seat, *row_of_rank = plan->row_of_rank;
    const int32_t *request = plan->several.request, *number = plan->several.number;
    for (int64_t rank = plan->tree->rows - 1; rank >= 0; rank--) {
        int64_t row = row_of_rank[rank];
        tables->rows[rank] = seat[request ? request[row] : row];
        first_row[tables->rows[rank]] = (int32_t)rank;
        if (number) tables->row_number[rank] = number[row];
    }
    for (int64_t i = merged - 1; i >= 0; i--) {
        int64_t row = tables->merge_rows[i];
        tables->merge_rows[i] = seat[request ? request[row] : row];
        first_merge[tables->merge_rows[i]] = (int32_t)i;
        if (number) tables->merge_number[i] = number[row];
    }
}

/* Writes the columns of all seats, and the claims. padded: see PADDING. */
static void write_seats(const Planned *plan, const Room *room, int64_t width, int64_t merged, int32_t *padded,
                        Tables *tables) {
    const int32_t *seat = plan->seat, *queries = plan->tree->queries;
    const int32_t *least = queries ? plan->several.least : plan->tree->least;
    int64_t line = width + PADDING, requests = plan->tree->requests;
    for (int64_t field = 0; field < OF_SEAT; field++)
        for (int64_t s = 0; s < width; s++) padded[field * line + s] = room->unknown[field];
    for (int64_t s = 0; queries && s < width; s++) tables->query_rows[s] = 1;
    for (int64_t i = 0, claims = 0; i < requests; i++) {
        int32_t *known = padded + seat[i];
        known[0] = of_requests(plan->tree, EPOCH)[i];
        known[line] = (int32_t)(of_requests(plan->tree, LENGTH)[i] + room->reserve);
        if (least) known[2 * line] = least[i];
        if (queries) tables->query_rows[seat[i]] = queries[i];
        int64_t count = write_claims(plan, room, i, tables->claims + claims * OF_CLAIM);
        if (!count) continue;
        for (int64_t column = 0; column < OF_CLAIM; column++)
            known[(5 + column) * line] = tables->claims[claims * OF_CLAIM + column];
        known[8 * line] = (int32_t)(claims + 1);
        known[9 * line] = (int32_t)(claims += count);
    }
    write_lists(plan, merged, padded + 3 * line, padded + 4 * line, tables);
    copy_columns(tables->seats, padded, OF_SEAT, width);
}

/* The plan that cohort_plan wrote. */
static Planned planned(const BatchTree *tree, const int32_t *words, const TableSizes *sizes) {
    int64_t groups = sizes->groups;
    return (Planned){groups, sizes->segments, words, words + 2 * groups, words + 3 * groups, words + 4 * groups + 1,
                     tree, of_nodes(tree, STOP), of_nodes(tree, SLOT), of_rows(tree, ROW_OF_RANK),
                     of_requests(tree, SEAT), of_requests(tree, ABOVE), of_requests(tree, SHARED), NOT_SEVERAL};
}

/*
 * words_of_plan: what cohort_plan made. made: room for `words` words; it gets the tables of `Tables`, one after
 * another. sizes: those of the plan; it gets those of the tables.
 * Returns the words that the tables need, also if there is no room for them; NO_MEMORY; or 0 for plans that read tokens
 * which no row sees, and where requests have several rows for groups that take several items: their first rows differ,
 * so these could put a cut of the plan in different places.
 */
int64_t item_tables(const BatchTree *tree, const int32_t *words_of_plan, const Room *room, int32_t *made, int64_t words,
                    TableSizes *sizes) {
    int64_t n = tree->requests, width = n, most = 0;
    if (tree->queries && sizes->widest > room->height) return 0;
    for (int64_t i = 0; i < n; i++) width = at_least(width, of_requests(tree, SEAT)[i] + 1);
    Planned of_tree = planned(tree, words_of_plan, sizes), *plan = &of_tree;
    for (int64_t s = 0; s < plan->segments; s++)
        if (plan->segment[LO * plan->segments + s] >= plan->segment[HI * plan->segments + s]) return 0;
    for (int64_t g = 0; g < plan->groups; g++) most += divided_up(plan->group_rows[g], room->height);
    int64_t numbers = 10 * most + tree->rows + 5 * (width + PADDING) + 32;
    Memory memory = {malloc(numbers * sizeof(int64_t) + room_of_several(tree, width)), 0};
    if (!memory.block) return NO_MEMORY;
    plan->several = find_several(tree, width, &memory);
    int64_t *group = TAKE(&memory, int64_t, most), *begin = TAKE(&memory, int64_t, most);
    int64_t *rows = TAKE(&memory, int64_t, most), *tokens = TAKE(&memory, int64_t, most);
    int64_t *slot = TAKE(&memory, int64_t, most);
    Items items = {0, group, begin, rows, tokens, slot, TAKE(&memory, int64_t, most)};
    int64_t entries = cut_items(plan, room, &items), claims = 0, merged = 0;
    int64_t *order = TAKE(&memory, int64_t, most), *spare = TAKE(&memory, int64_t, most);
    int64_t *key = TAKE(&memory, int64_t, most), *of_row = TAKE(&memory, int64_t, tree->rows + 1);
    char *is_partial = TAKE(&memory, char, most);
    int32_t *padded = TAKE(&memory, int32_t, OF_SEAT * (width + PADDING));
    for (int64_t i = 0; i < items.items; i++) {
        order[i] = i;
        key[i] = items.slot[i] - (items.tokens[i] << 32);
    }
    sort_by_key(order, spare, key, items.items);
    int64_t partials = count_partials(plan, &items, of_row, is_partial);
    for (int64_t i = 0; i < tree->rows; i++) merged += of_row[i] > 0;
    for (int64_t i = 0; i < n; i++) claims += write_claims(plan, room, i, NULL);
    int several = tree->queries != NULL;
    const int64_t length[] = {items.items * OF_ITEM, entries * OF_ENTRY, items.items + 1, tree->rows, merged,
                              merged + 1, partials, OF_SEAT * width, claims * OF_CLAIM,
                              several * width, several * tree->rows, several * merged};
    int64_t *at = sizes->at, end = 0;
    for (int64_t table = 0; table < TABLES; table++) {
        at[table] = end;
        end += length[table];
    }
    if (end <= words) {
        Tables tables = {made + at[ITEM_TABLE], made + at[ENTRIES], made + at[ENTRY_INDPTR], made + at[ROW_TABLE],
                         made + at[MERGE_ROWS], made + at[MERGE_INDPTR], made + at[MERGE_PARTIALS], made + at[SEATS],
                         made + at[CLAIMS], made + at[QUERY_ROWS], made + at[ROW_NUMBER], made + at[MERGE_NUMBER]};
        write_items(plan, room, &items, order, &tables, sizes);
        write_merges(plan, &items, order, is_partial, of_row, &tables);
        write_seats(plan, room, width, merged, padded, &tables);
    }
    sizes->items = items.items;
    sizes->entries = entries;
    sizes->rows = tree->rows;
    sizes->merged = merged;
    sizes->partials = partials;
    sizes->seats = width;
    sizes->claims = claims;
    sizes->several = several;
    free(memory.block);
    return end;
}
