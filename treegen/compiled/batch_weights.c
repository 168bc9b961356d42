/* Times of policies for a running batch: what treegen.search.weigh and .split_estimates compute. */
#include "batch_weights.h"
#include "arrays.h"
#include <math.h>

#define WHOLE ((double)INT32_MAX) /* the split of policies that split nothing */

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

static double joined(const WalkFacts *facts, double a, double b) {
    return pow(pow(a, facts->sharpness) + pow(b, facts->sharpness), 1 / facts->sharpness);
}

static void sort_rising(double *values, int64_t n) {
    for (int64_t gap = n / 2; gap > 0; gap = gap == 2 ? 1 : gap * 5 / 11)
        for (int64_t i = gap; i < n; i++) {
            double each = values[i];
            int64_t j = i;
            for (; j >= gap && values[j - gap] > each; j -= gap) values[j] = values[j - gap];
            values[j] = each;
        }
}

/* The number of a walk's chunk of lower cohorts; -1 for a walk of whole paths. */
static int64_t lower_chunk(const Walks *walks, int64_t w) {
    int64_t c = w - (walks->walks - walks->cuts);
    return c < 0 ? -1 : walks->walks + c;
}

static double parts_in(const Bins *bins, double split) {
    double parts = 0;
    for (int64_t b = 0; b < bins->count; b++) parts += bins->number[b] * ceil(bins->tokens[b] / split);
    return parts;
}

/* The packed tiles of a walk: runs are packed whole, or token by token where that takes clearly fewer tiles. */
static double packed_of(const Totals *totals, const WalkFacts *facts) {
    int spread = totals->full + totals->by_run > facts->spread * (totals->full + totals->by_token);
    return spread ? totals->by_token : totals->by_run;
}

/* Splits of a walk, as splits_of of treegen.search.split_estimates. */
static void split_walk(const WalkFacts *facts, Weighed *made, int64_t w) {
    const Totals *totals = &made->walks.totals[w];
    double step = (double)facts->rules.step, tile = (double)facts->tile_tokens;
    double even = (double)share_of((int64_t)totals->tokens, facts->shares, &facts->rules);
    double throughput_us = (totals->full + packed_of(totals, facts)) * facts->lanes * facts->full_us / facts->sms;
    int64_t lower = lower_chunk(&made->walks, w);
    made->splits[0][w] = WHOLE;
    made->splits[EVEN][w] = even;
    for (int64_t s = EVEN + 1; s < SPLITS; s++) {
        double blocks = (double)facts->blocks_per_sm[s - EVEN - 1];
        double wanted = larger(floor(blocks * facts->sms / facts->lanes), 1);
        int divided = wanted > totals->cohorts;
        double split = divided ? totals->tokens / larger(wanted - totals->cohorts / 2, 0.5)
                               : tile * throughput_us / (facts->lone_us * blocks);
        split = ceil(split / step) * step;
        double parts = parts_in(&made->walks.bins[w], split);
        if (lower >= 0) parts += parts_in(&made->walks.bins[lower], split);
        double excess = parts / wanted;
        if (divided && excess > 1) split = ceil(split * excess / step) * step;
        made->splits[s][w] = facts->is_latent ? even : split;
    }
    for (int64_t s = EVEN; s < SPLITS; s++)
        if (!(made->splits[s][w] < totals->longest)) made->splits[s][w] = WHOLE;
}

typedef struct {
    double items, item_rows, written, merged, seeing;
} Outputs;

/* Adds the results of a chunk's cohorts. share: of its rows with results in the other chunk of the walk, too. */
static void add_outputs(const Bins *bins, double split, double share, int is_lower, Outputs *to) {
    for (int64_t b = 0; b < bins->count; b++) {
        double parts = ceil(bins->tokens[b] / split), rows = bins->rows[b] * parts;
        double merged = is_lower ? parts > 0 : parts > 1 ? 1 - share : 0; /* rows of both count in the lower one */
        to->items += bins->number[b] * parts;
        to->item_rows += rows;
        to->written += rows * (parts > 1 ? 1 : share);
        to->merged += bins->rows[b] * merged;
        to->seeing += bins->tokens[b] > 0 ? bins->rows[b] : 0;
    }
}

/* Estimates the microseconds of a walk with one of its splits, by the terms of the cost model. */
static void time_split(const SpannedTree *tree, const WalkFacts *facts, Weighed *made, int64_t s, int64_t w) {
    const Walks *walks = &made->walks;
    const Totals *totals = &walks->totals[w];
    Outputs of = {0, 0, 0, 0, 0};
    int64_t lower = lower_chunk(walks, w);
    double split = made->splits[s][w], tile = (double)facts->tile_tokens, share = 0;
    if (lower >= 0) share = walks->below[lower - walks->walks];
    add_outputs(&walks->bins[w], split, share, 0, &of);
    if (lower >= 0)
        add_outputs(&walks->bins[lower], split, 1, 1, &of);
    else
        of.merged += (double)tree->rows - of.seeing;
    double cut_tiles = walks->cuts || facts->walk_rows[w] > 1 ? facts->cut_tiles : 0;
    double packed = packed_of(totals, facts) + cut_tiles * (of.items - totals->cohorts);
    double memory = (double)tree->unique_tokens * (double)facts->kv_bytes + of.item_rows * (double)facts->q_bytes;
    memory += of.written * (double)facts->partial_bytes + (of.item_rows - of.written) * (double)facts->final_bytes;
    double blocks_us = of.items * facts->item_us + totals->full * facts->full_tile_us + packed * facts->packed_tile_us;
    made->busy_us[s][w] = joined(facts, blocks_us, memory * facts->byte_us);
    double merged = of.written * (double)facts->partial_bytes + of.merged * (double)facts->final_bytes;
    made->rest_us[s][w] = facts->launch_us + (of.merged > 0 ? merged * facts->merged_byte_us + facts->next_launch_us
                                                             : facts->idle_merge_us);
    double longest = smaller(split, totals->longest) / tile + facts->item_tiles;
    double every = (totals->tokens / tile + facts->item_tiles * of.items) / facts->shares;
    made->times_us[s][w] =
        made->rest_us[s][w] + joined(facts, facts->lone_us * larger(longest, every), made->busy_us[s][w]);
}

/* Weighs all policies. cohorts: room for the tokens of all cohorts. Returns the number of walks, or NO_MEMORY. */
int64_t weigh_policies(const SpannedTree *tree, const WalkFacts *facts, Weighed *made, int64_t *cohorts) {
    made->walks.cohorts = cohorts;
    if (find_walks(tree, facts, &made->walks) < 0) return NO_MEMORY;
    for (int64_t w = 0; w < made->walks.walks; w++) {
        split_walk(facts, made, w);
        for (int64_t s = 0; s < SPLITS; s++) time_split(tree, facts, made, s, w);
    }
    return made->walks.walks;
}

/* What a caller has to give room for, in bytes. */
int64_t size_of_weighed(void) { return sizeof(Weighed); }

/* The work items of a policy's plan. */
int64_t policy_items(const Weighed *made, int64_t s, int64_t w) {
    int64_t items = 0, split = (int64_t)made->splits[s][w];
    for (int64_t i = made->walks.first[w]; i < made->walks.first[w + 1]; i++)
        items += divided_up(made->walks.cohorts[i], split);
    return items;
}

/* The tiles that the thread block that ends last reads, if each takes the longest part that is left. */
static double tiles_of_last(double *parts, int64_t n, int64_t blocks) {
    sort_rising(parts, n);
    double *loads = parts + at_least(n - blocks, 0);
    int64_t number = parts + n - loads;
    for (int64_t left = n - blocks; left > 0; left -= blocks) {
        int64_t behind = at_most(left, blocks);
        for (int64_t i = 0; i < behind; i++) loads[i] += parts[left - 1 - i];
        sort_rising(loads, number);
    }
    return loads[number - 1];
}

/* Estimates the microseconds of a policy by the tokens of each of its items. Returns NO_MEMORY if that is so. */
int64_t policy_time(const WalkFacts *facts, const Weighed *made, int64_t s, int64_t w, double *time_us) {
    const int64_t *cohorts = made->walks.cohorts + made->walks.first[w];
    int64_t groups = made->walks.first[w + 1] - made->walks.first[w], split = (int64_t)made->splits[s][w];
    int64_t room = 2 * policy_items(made, s, w) + 2, is_even = s == EVEN && split < INT32_MAX;
    Memory memory = {malloc((groups + 1 + 4 * room) * sizeof(int64_t)), 0};
    if (!memory.block) return NO_MEMORY;
    int64_t *of_groups = TAKE(&memory, int64_t, groups + 1);
    memcpy(of_groups, cohorts, groups * sizeof *cohorts);
    to_offsets(of_groups, groups);
    Parts parts = {0, TAKE(&memory, int64_t, room), TAKE(&memory, int64_t, room), TAKE(&memory, int64_t, room)};
    double *tiles = TAKE(&memory, double, room);
    int64_t n = is_even ? cut_evenly(of_groups, groups, facts->shares, &facts->rules, &parts)
                        : cut_every(of_groups, groups, split, &parts);
    for (int64_t i = 0; i < n; i++)
        tiles[i] = (double)(parts.end[i] - parts.begin[i]) / (double)facts->tile_tokens + facts->item_tiles;
    if (n > 0) {
        double last = tiles_of_last(tiles, n, at_least((int64_t)facts->shares, 1));
        *time_us = made->rest_us[s][w] + joined(facts, facts->lone_us * last, made->busy_us[s][w]);
    }
    free(memory.block);
    return n;
}

/*
 * Finds the policy with the least time among those of at most `most_items` work items, or else one with the fewest.
 * place: gets the number of its split and its walk. Returns 0, or NO_MEMORY.
 */
int64_t best_policy(const WalkFacts *facts, const Weighed *made, int64_t most_items, int64_t *place) {
    int64_t order[SPLITS * MOST_WALKS], n = 0, fewest = INT64_MAX;
    for (int64_t s = 0; s < SPLITS; s++)
        for (int64_t w = 0; w < made->walks.walks; w++) {
            if (s && made->splits[s][w] == WHOLE) continue; /* it stands in the first row as well */
            double time_us = made->times_us[s][w];
            int64_t i = n++;
            for (; i > 0; i--) {
                int64_t before = order[i - 1];
                if (made->times_us[before / MOST_WALKS][before % MOST_WALKS] <= time_us) break;
                order[i] = before;
            }
            order[i] = s * MOST_WALKS + w;
        }
    double best_us = INFINITY;
    for (int64_t i = 0; i < n; i++) {
        int64_t s = order[i] / MOST_WALKS, w = order[i] % MOST_WALKS, items = policy_items(made, s, w);
        if (made->times_us[s][w] >= best_us) break;
        double time_us = INFINITY;
        if (items <= most_items && policy_time(facts, made, s, w, &time_us) < 0) return NO_MEMORY;
        if (time_us < best_us || (best_us == INFINITY && items < fewest)) {
            place[0] = s;
            place[1] = w;
        }
        best_us = smaller(best_us, time_us);
        fewest = at_most(fewest, items);
    }
    return 0;
}
