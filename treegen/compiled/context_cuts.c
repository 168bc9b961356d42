/* Cuts of the tokens that groups read: what treegen.strategies.context_cuts finds. */
#include "context_cuts.h"
#include "arrays.h"
#include <math.h>

#define MOST_SHARES 4e18 /* that an int64_t holds */

/* a // b of Python's floats, b above 0 */
static double floored(double a, double b) {
    double rest = fmod(a, b), whole = (a - rest) / b;
    if (rest < 0) whole -= 1;
    double down = floor(whole);
    return whole - down > 0.5 ? down + 1 : down;
}

/* Counts the parts of at most `length` tokens. */
int64_t count_parts(const int64_t *of_groups, int64_t groups, int64_t length) {
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g++) count += divided_up(of_groups[g + 1] - of_groups[g], length);
    return count;
}

/* Lists the parts of at most `length` tokens. Returns their number. */
int64_t cut_every(const int64_t *of_groups, int64_t groups, int64_t length, Parts *made) {
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g++)
        for (int64_t begin = of_groups[g]; begin < of_groups[g + 1]; begin += length, count++) {
            made->group[count] = g;
            made->begin[count] = begin;
            made->end[count] = at_most(begin + length, of_groups[g + 1]);
        }
    return made->parts = count;
}

static int rises(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Adds behind[0:n], the longest first, to the loads, the shortest first, and sorts the loads anew. */
static void put_behind(int64_t *loads, int64_t blocks, const int64_t *behind, int64_t n) {
    for (int64_t i = 0; i < n; i++) loads[i] += behind[i];
    qsort(loads, blocks, sizeof *loads, rises);
}

/* Finds where to cut parts that would end late, as context_cuts._late_cuts. Returns the number of `cuts`. */
static int64_t late_cuts(const Parts *parts, int64_t share, int64_t blocks, const ShareRules *rules, int64_t *cuts) {
    int64_t n = parts->parts, kept = 0;
    if (!(blocks < n && n <= rules->most_parts * blocks)) return 0;
    int64_t *memory = malloc(5 * n * sizeof(int64_t));
    if (!memory) return NO_MEMORY;
    int64_t *order = memory, *spare = order + n, *key = spare + n, *falling = key + n, *loads = falling + n;
    for (int64_t i = 0; i < n; i++) {
        order[i] = i;
        key[i] = parts->begin[i] - parts->end[i];
    }
    sort_by_key(order, spare, key, n);
    for (int64_t i = 0; i < n; i++) falling[i] = -key[order[i]];
    for (int64_t i = 0; i < blocks; i++) loads[i] = falling[blocks - 1 - i];
    int64_t limit = share + at_least((int64_t)(rules->late * (double)share), rules->late_tokens), place = blocks;
    for (; place < n; place += blocks) {
        int64_t behind = at_most(blocks, n - place), latest = 0;
        for (int64_t i = 0; i < behind; i++) latest = at_least(latest, falling[place + i] + loads[i]);
        if (latest > limit) break;
        put_behind(loads, blocks, falling + place, behind);
    }
    int64_t rest = 0, step = rules->step, most = share;
    for (int64_t i = place; i < n; i++) rest += falling[i];
    for (;; most += step) {
        int64_t rooms = 0;
        for (int64_t i = 0; i < blocks; i++) rooms += at_least(most - loads[i], 0) / step * step;
        if (rooms >= rest) break;
    }
    int64_t cut = 0, part = place, ended = 0; /* tokens of the parts from `place` on that end before `part` */
    for (int64_t i = 0; place < n && i < blocks; i++) {
        int64_t room = at_least(most - loads[i], 0) / step * step;
        cut += room;
        if (!room || cut >= rest) continue;
        while (ended + falling[part] <= cut) ended += falling[part++];
        int64_t before = cut - ended;
        if (before >= step && falling[part] - before >= step) cuts[kept++] = parts->begin[order[part]] + before;
    }
    free(memory);
    return kept;
}

/* The tokens of a share, as context_cuts.even_share; 0 for those that are out of range. */
int64_t share_of(int64_t tokens, double shares, const ShareRules *rules) {
    double step = (double)rules->step, share = -floored(-(double)tokens * rules->room, shares * step) * step;
    return share < MOST_SHARES && shares < MOST_SHARES ? at_least((int64_t)share, 1) : 0;
}

/* Cuts groups as context_cuts.cut_evenly; `made` has room for twice the parts of a share. Returns their number. */
int64_t cut_evenly(const int64_t *of_groups, int64_t groups, double shares, const ShareRules *rules, Parts *made) {
    int64_t share = share_of(of_groups[groups], shares, rules);
    int64_t n = cut_every(of_groups, groups, share, made), *cuts = made->group + n; /* behind the parts */
    int64_t found = late_cuts(made, share, (int64_t)shares, rules, cuts);
    if (found <= 0) return found < 0 ? found : n;
    memcpy(made->begin + n, cuts, found * sizeof *cuts);
    n = made->parts = n + found;
    qsort(made->begin, n, sizeof *made->begin, rises);
    for (int64_t i = 0, g = 0; i < n; i++) {
        while (of_groups[g + 1] <= made->begin[i]) g++;
        made->group[i] = g;
        made->end[i] = i + 1 < n ? made->begin[i + 1] : of_groups[groups];
    }
    return n;
}
