/* Policies for a running batch, weighed as treegen.search.weigh does where all walks have one kernel config. */
#pragma once
#include "context_cuts.h"
#include <stdint.h>

enum { MOST_CUTS = 2, MOST_WALKS = 8, MOST_CHUNKS = MOST_WALKS + MOST_CUTS, SPLITS = 4, EVEN = 1 };
enum { FEW = 512 }; /* cohorts of a chunk that each have a bin; more of them share at most as many */

/* A tree: its spans, in columns, and for each node its parent and the ranks of the rows that see it. */
typedef struct {
    int64_t rows, spans, nodes, unique_tokens;
    const int32_t *of_spans, *parent, *rank_lo, *rank_hi;
} SpannedTree;

/* What no tree changes; see WalkFacts of treegen.search.compiled_weights. */
typedef struct {
    int64_t whole, walk_rows[MOST_WALKS], tile_tokens, run_tokens, is_latent;
    int64_t blocks_per_sm[SPLITS - 2]; /* of the splits that are neither none nor even shares */
    double spread, lanes, sms, shares, lone_us, full_us;
    double item_us, full_tile_us, packed_tile_us, byte_us, merged_byte_us, launch_us, next_launch_us, idle_merge_us;
    double sharpness, item_tiles, cut_tiles;
    int64_t kv_bytes, q_bytes, partial_bytes, final_bytes;
    ShareRules rules;
} WalkFacts;

/* Cohorts of a chunk with about equal tokens: how many there are, their rows, and the mean tokens of one. */
typedef struct {
    int64_t count;
    double number[FEW], rows[FEW], tokens[FEW];
} Bins;

/* Totals of the cohorts of a walk, as Tally of treegen.search.cohort_sums. */
typedef struct {
    double tokens, cohorts, full, by_run, by_token, longest;
} Totals;

/*
 * All walks of a tree. thresholds: on rows, of the cuts. below: the share of the rows that are below each cut.
 * cohorts[first[w] : first[w + 1]]: the tokens of each cohort of walk w, without empty ones.
 */
typedef struct {
    int64_t walks, cuts, thresholds[MOST_CUTS];
    double below[MOST_CUTS];
    int64_t first[MOST_WALKS + 1], *cohorts;
    Totals totals[MOST_WALKS];
    Bins bins[MOST_CHUNKS];
} Walks;

/* The policies: how a walk is split, and its microseconds, at least. */
typedef struct {
    double splits[SPLITS][MOST_WALKS], times_us[SPLITS][MOST_WALKS], busy_us[SPLITS][MOST_WALKS];
    double rest_us[SPLITS][MOST_WALKS];
    Walks walks;
} Weighed;

/* Finds the walks of a tree; walks->cohorts has room for all cohorts. Returns the number of these, or NO_MEMORY. */
int64_t find_walks(const SpannedTree *tree, const WalkFacts *facts, Walks *walks);
