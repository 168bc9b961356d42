/* Parts that the tokens of groups are cut into. */
#pragma once
#include <stdint.h>

/* How even shares are cut: values of treegen.strategies.context_cuts. */
typedef struct {
    double room;
    int64_t step, most_parts, late_tokens;
    double late;
} ShareRules;

/* Parts of groups: tokens begin:end, counted through the segments of all groups. */
typedef struct {
    int64_t parts;
    int64_t *group, *begin, *end;
} Parts;

/* of_groups: offsets of the groups' tokens. */
int64_t count_parts(const int64_t *of_groups, int64_t groups, int64_t length);
int64_t cut_every(const int64_t *of_groups, int64_t groups, int64_t length, Parts *made);
int64_t share_of(int64_t tokens, double shares, const ShareRules *rules);
int64_t cut_evenly(const int64_t *of_groups, int64_t groups, double shares, const ShareRules *rules, Parts *made);
