/* Tables of work items by request: what treegen.schedule.by_request makes of a plan with one rank interval a group. */
#include "arrays.h"
#include "batch_tables.h"

enum { LO = RANK_LO, HI = RANK_HI }; /* lines of a plan's segments, as of nodes */

/* A plan, with the columns of its tree that its tables follow from. least: NULL for none. */
typedef struct {
    int64_t groups, segments, nodes, requests;
    const int32_t *row_lo, *group_rows, *segment_indptr, *segment;
    const int32_t *node_tokens, *node_slots, *owner, *first, *end, *row_of_rank;
    const int32_t *seat, *epoch, *above, *shared, *length, *least;
} Planned;

/* Work items: rows begin:begin + rows of a group, and the entries that each has, from `first` on. */
typedef struct {
    int64_t items;
    int64_t *group, *begin, *rows, *tokens, *slot, *entries;
} Items;

/* Where the tables lie in `made`, one after another. */
typedef struct {
    int32_t *items, *entries, *entry_indptr, *rows, *merge_rows, *merge_indptr, *merge_partials, *seats, *claims;
} Tables;

static int is_seen(const Planned *plan, int64_t s, int64_t begin, int64_t rows) {
    return plan->segment[LO * plan->segments + s] < begin + rows && plan->segment[HI * plan->segments + s] > begin;
}

/* Cuts groups into items of at most room->height rows that read anything. Returns the entries of all items. */
static int64_t cut_items(const Planned *plan, const Room *room, Items *made) {
    int64_t all = 0;
    made->items = 0;
    for (int64_t g = 0; g < plan->groups; g++)
        for (int64_t begin = 0; begin < plan->group_rows[g]; begin += room->height) {
            int64_t i = made->items, rows = at_most(room->height, plan->group_rows[g] - begin);
            int64_t tokens = 0, entries = 0;
            for (int64_t s = plan->segment_indptr[g]; s < plan->segment_indptr[g + 1]; s++) {
                if (!is_seen(plan, s, begin, rows)) continue;
                int64_t start = plan->segment[START * plan->segments + s];
                if (!entries++) made->slot[i] = plan->node_slots[plan->segment[NODE * plan->segments + s]] + start;
                tokens += plan->segment[STOP * plan->segments + s] - start;
            }
            if (!entries) continue;
            made->group[i] = g;
            made->begin[i] = begin;
            made->rows[i] = rows;
            made->tokens[i] = tokens;
            made->entries[i] = entries;
            made->items++;
            all += entries;
        }
    return all;
}

/* Writes one entry. Returns the most tokens that it has until the next plan. */
static int64_t write_entry(const Planned *plan, const Room *room, int64_t s, int64_t begin, int64_t rows,
                           int32_t *entry) {
    const int32_t *segment = plan->segment + s;
    int64_t all = plan->segments, node = segment[NODE * all], stop = segment[STOP * all];
    int64_t first = plan->first[node], end = plan->end[node];
    int64_t unit = at_least((int64_t)1 << room->tile_power, room->page_size), from = segment[START * all] & -unit;
    int to_end = stop == plan->node_tokens[node], opened = end == 0 && to_end;
    if (!to_end) {
        stop &= -unit;
        end = first + stop;
    }
    first += from;
    if (stop == from) first = end = unit; /* nothing, at any place but 0 */
    entry[0] = plan->owner[node];
    entry[1] = (int32_t)first;
    entry[2] = (int32_t)end;
    entry[3] = (int32_t)(at_least(segment[LO * all], begin) - begin);
    entry[4] = (int32_t)(at_most(segment[HI * all], begin + rows) - begin);
    return stop - from + (opened ? room->reserve : 0);
}

/* Writes items in launch order, with the room of each, and their entries. */
static void write_items(const Planned *plan, const Room *room, const Items *items, const int64_t *order,
                        Tables *tables, TableSizes *sizes) {
    int64_t tokens = (int64_t)1 << room->tile_power, run = (int64_t)1 << room->run_power;
    int64_t tiles = 0, runs = 0, entries = 0;
    tables->entry_indptr[0] = 0;
    for (int64_t k = 0; k < items->items; k++) {
        int64_t i = order[k], g = items->group[i], begin = items->begin[i], rows = items->rows[i], item_runs = 0;
        int32_t *item = tables->items + k * OF_ITEM;
        memset(item, 0, OF_ITEM * sizeof *item);
        item[0] = (int32_t)(plan->row_lo[g] + begin);
        item[1] = (int32_t)rows;
        item[2] = (int32_t)tiles;
        item[4] = (int32_t)runs;
        item[6] = -1;
        item[7] = (int32_t)g;
        for (int64_t s = plan->segment_indptr[g]; s < plan->segment_indptr[g + 1]; s++) {
            if (!is_seen(plan, s, begin, rows)) continue;
            int64_t most = write_entry(plan, room, s, begin, rows, tables->entries + entries++ * OF_ENTRY);
            tiles += most >> room->tile_power;
            item_runs += (at_most(most, tokens - 1) + run - 1) >> room->run_power;
        }
        runs += (item_runs + tokens / run - 1) & -(tokens / run);
        tables->entry_indptr[k + 1] = (int32_t)entries;
    }
    sizes->tiles = tiles;
    sizes->runs = runs;
}

/*
 * Finds the items that write partials: one of their rows has another item, too. of_request: the partials of each
 * request. Returns the number of all partials.
 */
static int64_t count_partials(const Planned *plan, const Items *items, int64_t *of_request, char *is_partial) {
    int64_t partials = 0;
    memset(of_request, 0, plan->requests * sizeof *of_request);
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        for (int64_t r = 0; r < items->rows[i]; r++) of_request[row[r]]++;
    }
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        is_partial[i] = 0;
        for (int64_t r = 0; r < items->rows[i]; r++) is_partial[i] |= of_request[row[r]] > 1;
    }
    memset(of_request, 0, plan->requests * sizeof *of_request);
    for (int64_t i = 0; i < items->items; i++) {
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        if (!is_partial[i]) continue;
        for (int64_t r = 0; r < items->rows[i]; r++) of_request[row[r]]++;
        partials += items->rows[i];
    }
    return partials;
}

/* Writes merge lists, and partial slots into the items. of_request: as of count_partials; it is used up. */
static void write_merges(const Planned *plan, const Items *items, const int64_t *order, const char *is_partial,
                         int64_t *of_request, Tables *tables) {
    int64_t merged = 0, slots = 0;
    tables->merge_indptr[0] = 0;
    for (int64_t i = 0; i < plan->requests; i++) {
        if (!of_request[i]) continue;
        tables->merge_rows[merged] = (int32_t)i;
        tables->merge_indptr[merged + 1] = tables->merge_indptr[merged] + (int32_t)of_request[i];
        merged++;
    }
    to_offsets(of_request, plan->requests);
    for (int64_t k = 0; k < items->items; k++) {
        int64_t i = order[k];
        const int32_t *row = plan->row_of_rank + plan->row_lo[items->group[i]] + items->begin[i];
        if (!is_partial[i]) continue;
        tables->items[k * OF_ITEM + 6] = (int32_t)slots;
        for (int64_t r = 0; r < items->rows[i]; r++) tables->merge_partials[of_request[row[r]]++] = (int32_t)slots++;
    }
}

/* Counts the claims of a request; with `claims`, writes them there, by rising pages. */
static int64_t write_claims(const Planned *plan, const Room *room, int64_t request, int32_t *claims) {
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

/* Writes the columns of all seats, and the claims; numbers of requests in lists become seats. padded: see PADDING. */
static void write_seats(const Planned *plan, const Room *room, int64_t width, int64_t merged, int32_t *padded,
                        Tables *tables) {
    const int32_t *seat = plan->seat;
    int64_t line = width + PADDING;
    for (int64_t field = 0; field < OF_SEAT; field++)
        for (int64_t s = 0; s < width; s++) padded[field * line + s] = room->unknown[field];
    for (int64_t i = 0, claims = 0; i < plan->requests; i++) {
        int32_t *known = padded + seat[i];
        known[0] = plan->epoch[i];
        known[line] = (int32_t)(plan->length[i] + room->reserve);
        if (plan->least) known[2 * line] = plan->least[i];
        int64_t count = write_claims(plan, room, i, tables->claims + claims * OF_CLAIM);
        if (!count) continue;
        for (int64_t column = 0; column < OF_CLAIM; column++)
            known[(5 + column) * line] = tables->claims[claims * OF_CLAIM + column];
        known[8 * line] = (int32_t)(claims + 1);
        known[9 * line] = (int32_t)(claims += count);
    }
    for (int64_t rank = 0; rank < plan->requests; rank++) {
        tables->rows[rank] = seat[plan->row_of_rank[rank]];
        padded[3 * line + tables->rows[rank]] = (int32_t)rank;
    }
    for (int64_t row = 0; row < merged; row++) {
        tables->merge_rows[row] = seat[tables->merge_rows[row]];
        padded[4 * line + tables->merge_rows[row]] = (int32_t)row;
    }
    copy_columns(tables->seats, padded, OF_SEAT, width);
}

/* The plan that cohort_plan wrote. */
static Planned planned(const BatchTree *tree, const int32_t *words, const TableSizes *sizes) {
    int64_t groups = sizes->groups;
    Planned plan = {groups, sizes->segments, tree->nodes, tree->requests, words, words + 2 * groups, words + 3 * groups,
                    words + 4 * groups + 1, of_nodes(tree, STOP), of_nodes(tree, SLOT), of_nodes(tree, OWNER),
                    of_nodes(tree, FIRST), of_nodes(tree, END), of_rows(tree, ROW_OF_RANK), of_rows(tree, SEAT),
                    of_rows(tree, EPOCH), of_rows(tree, ABOVE), of_rows(tree, SHARED), of_rows(tree, LENGTH),
                    tree->least};
    return plan;
}

/*
 * words_of_plan: what cohort_plan made. made: room for `words` words; it gets the tables of `Tables`, one after
 * another. sizes: those of the plan; it gets those of the tables.
 * Returns the words that the tables need, also if there is no room for them; NO_MEMORY; or 0 for plans that read tokens
 * which no row sees.
 */
int64_t item_tables(const BatchTree *tree, const int32_t *words_of_plan, const Room *room, int32_t *made, int64_t words,
                    TableSizes *sizes) {
    const Planned of_tree = planned(tree, words_of_plan, sizes), *plan = &of_tree;
    int64_t most = 0, n = plan->requests, width = n;
    for (int64_t i = 0; i < n; i++) width = at_least(width, plan->seat[i] + 1);
    for (int64_t s = 0; s < plan->segments; s++)
        if (plan->segment[LO * plan->segments + s] >= plan->segment[HI * plan->segments + s]) return 0;
    for (int64_t g = 0; g < plan->groups; g++) most += divided_up(plan->group_rows[g], room->height);
    Memory memory = {malloc((10 * most + n + 5 * (width + PADDING) + 32) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int64_t *group = TAKE(&memory, int64_t, most), *begin = TAKE(&memory, int64_t, most);
    int64_t *rows = TAKE(&memory, int64_t, most), *tokens = TAKE(&memory, int64_t, most);
    int64_t *slot = TAKE(&memory, int64_t, most);
    Items items = {0, group, begin, rows, tokens, slot, TAKE(&memory, int64_t, most)};
    int64_t entries = cut_items(plan, room, &items), claims = 0, merged = 0;
    int64_t *order = TAKE(&memory, int64_t, most), *spare = TAKE(&memory, int64_t, most);
    int64_t *key = TAKE(&memory, int64_t, most), *of_request = TAKE(&memory, int64_t, n + 1);
    char *is_partial = TAKE(&memory, char, most);
    int32_t *padded = TAKE(&memory, int32_t, OF_SEAT * (width + PADDING));
    for (int64_t i = 0; i < items.items; i++) {
        order[i] = i;
        key[i] = items.slot[i] - (items.tokens[i] << 32);
    }
    sort_by_key(order, spare, key, items.items);
    int64_t partials = count_partials(plan, &items, of_request, is_partial);
    for (int64_t i = 0; i < n; i++) {
        merged += of_request[i] > 0;
        claims += write_claims(plan, room, i, NULL);
    }
    const int64_t length[] = {items.items * OF_ITEM, entries * OF_ENTRY, items.items + 1, n, merged,
                              merged + 1, partials, OF_SEAT * width, claims * OF_CLAIM};
    int64_t *at = sizes->at, end = 0;
    for (int64_t table = 0; table < TABLES; table++) {
        at[table] = end;
        end += length[table];
    }
    if (end <= words) {
        Tables tables = {made + at[ITEM_TABLE], made + at[ENTRIES], made + at[ENTRY_INDPTR], made + at[ROW_TABLE],
                         made + at[MERGE_ROWS], made + at[MERGE_INDPTR], made + at[MERGE_PARTIALS], made + at[SEATS],
                         made + at[CLAIMS]};
        write_items(plan, room, &items, order, &tables, sizes);
        write_merges(plan, &items, order, is_partial, of_request, &tables);
        write_seats(plan, room, width, merged, padded, &tables);
    }
    sizes->items = items.items;
    sizes->entries = entries;
    sizes->rows = n;
    sizes->merged = merged;
    sizes->partials = partials;
    sizes->seats = width;
    sizes->claims = claims;
    free(memory.block);
    return end;
}
