/* Sampling of one token per row. Contract: sampling.py, whose reference gives the same ids, bit for bit; noise.py.

So that every version computes the same numbers, products and sums are not contracted here. */
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <float.h>

#include "cpu_noise.h"
#include "cpu_rows.h"
#include "cpu_team.h"

#define DIGITS 2048
#define FIRST_SHIFT 20 /* keys have 31 bits; their digits 11, 11 and 9 */
#define MASS_BITS 29   /* the likeliest token's mass is 2^29; four fit an unsigned integer */
#define MASSLESS -21.0f /* e^z 2^29 is below 1 */

typedef struct {
    double score;
    int64_t id;
} winner;

/* What the phases leave behind of GROUP tokens, for whichever thread goes on. 11 words: sampling.GROUP_SCRATCH. */
typedef struct {
    float tops[GROUP_BLOCKS]; /* the largest logit of each block */
    int64_t mass;
    winner best; /* of this group and those before it that the same thread has looked at */
} group_scratch;

typedef struct {
    const float *logits, *temperature, *top_p, *min_p;
    const int64_t *top_k, *seeds, *positions;
    int64_t *ids;
    group_scratch *scratch;
    float *values; /* room for a row, and GROUP more, of each thread */
    int64_t num_rows, vocab_size, row_stride;
} sampling_args;

/* A row as z = (logit - top) * scale, which is at most 0. */
typedef struct {
    const float *logits;
    group_scratch *groups;
    float *values; /* room for every token's z */
    int64_t num_tokens, num_groups, top_id;
    float top, scale;
    uint64_t seed, position;
} logits_row;

INLINE vf vector_z(const logits_row *row, const float *x) { return (load_f32(x, LANES) - row->top) * row->scale; }
INLINE float scaled(const logits_row *row, float logit) { return (logit - row->top) * row->scale; }

typedef uint64_t v64 __attribute__((vector_size(LANES * 4)));

/* z in the order of integers: the larger the key, the smaller z. */
INLINE int32_t key_of(float z) {
    int32_t bits;
    memcpy(&bits, &z, 4);
    return bits & 0x7fffffff;
}
INLINE float z_of_key(int32_t key) {
    float size;
    memcpy(&size, &key, 4);
    return -size;
}

/* sampling._mass before it is rounded: e^z 2^29, and for z below MASSLESS a little more than that. */
INLINE vf mass_of(vf z) {
    vf exponent = vmax(z, splat(MASSLESS)) * 1.44269504f;
    vf shifted = exponent + (12582912.0f + MASS_BITS); /* the lowest bits are those of a whole number */
    vf r = exponent - (shifted - (12582912.0f + MASS_BITS));
    vf p = r * 0.00133335581f + 0.00961812911f;
    p = p * r + 0.0555041087f;
    p = p * r + 0.240226507f;
    p = p * r + 0.693147181f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* The mass of one group's tokens at or above the bound. */
static int64_t group_mass(const logits_row *row, int64_t group, float bound) {
    const float *tops = row->groups[group].tops;
    float padded[BLOCK];
    v64 halves = {0};
    int64_t total = 0;
    for (int b = 0; b < GROUP_BLOCKS; b++) {
        float top = scaled(row, tops[b]);
        if (top < bound || top < MASSLESS) continue;
        const float *x = block_at(row->logits, row->num_tokens, group * GROUP + b * BLOCK, padded);
        for (int i = 0; i < BLOCK; i += 4 * LANES) {
            vu sum = {0}; /* of four masses */
            for (int j = i; j < i + 4 * LANES; j += LANES) {
                vf z = vector_z(row, x + j);
                sum += (vu)(__builtin_convertvector(mass_of(z), vi) & (z >= bound));
            }
            halves += ((v64)sum & 0xffffffffu) + ((v64)sum >> 32);
        }
    }
    for (int i = 0; i < LANES / 2; i++) total += (int64_t)halves[i];
    return total;
}

/* Collects z of the tokens at or above the bound: fewer than num_tokens + BLOCK, with room for LANES more. */
static int64_t gather(const logits_row *row, float bound, float *values) {
    float padded[BLOCK];
    int64_t count = 0;
    for (int64_t g = 0; g < row->num_groups; g++)
        for (int b = 0; b < GROUP_BLOCKS; b++) {
            int64_t first = g * GROUP + b * BLOCK;
            if (first >= row->num_tokens || scaled(row, row->groups[g].tops[b]) < bound) continue;
            const float *x = block_at(row->logits, row->num_tokens, first, padded);
            for (int i = 0; i < BLOCK; i += LANES) {
                vf z = vector_z(row, x + i);
                count = append_lanes(values, count, z, z >= bound);
            }
        }
    return count;
}

/* Moves the values with keys low..last to the front. */
static int64_t keep(float *values, int64_t count, int32_t low, int32_t last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        vf z = load_f32(values + i, LANES);
        vi key = (vi)z & 0x7fffffff, is_value = lane_numbers() < (int32_t)(count - i < LANES ? count - i : LANES);
        kept = append_lanes(values, kept, z, (key >= low) & (key <= last) & is_value);
    }
    return kept;
}

/* Adds up what values weigh, by digit of their keys: their masses, or 1 each. */
static void add_weights(const float *values, int64_t count, int32_t low, int shift, int by_mass, int64_t *weights) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        int32_t digits[BLOCK], sizes[BLOCK];
        int64_t n = count - first < BLOCK ? count - first : BLOCK;
        for (int64_t i = 0; i < n; i += LANES) {
            vf z = load_f32(values + first + i, LANES);
            vi digit = (((vi)z & 0x7fffffff) - low) >> shift, size = __builtin_convertvector(mass_of(z), vi);
            memcpy(digits + i, &digit, sizeof digit);
            memcpy(sizes + i, &size, sizeof size);
        }
        for (int64_t i = 0; i < n; i++) weights[digits[i]] += by_mass ? sizes[i] : 1;
    }
}

/* The largest z such that the tokens at or above it weigh `needed` or more, digit by digit of its key. It is known not
   to lie below the bound. */
static float find_threshold(const logits_row *row, float bound, double needed, int by_mass) {
    int64_t count = gather(row, bound, row->values), above = 0; /* above: the weight of the keys below `low` */
    int32_t low = 0;
    for (int shift = FIRST_SHIFT;; shift = shift == FIRST_SHIFT ? 9 : 0) {
        int64_t weights[DIGITS] = {0};
        int32_t digit = 0;
        add_weights(row->values, count, low, shift, by_mass, weights);
        while (digit < DIGITS - 1 && (double)(above + weights[digit]) < needed) above += weights[digit++];
        low += digit << shift;
        if (shift == 0) return z_of_key(low);
        count = keep(row->values, count, low, low + (1 << shift) - 1);
    }
}

/* A value that at least k of the blocks' largest reach; -inf where there are fewer blocks. */
static float bound_of_top_k(const logits_row *row, int64_t k) {
    int64_t counts[DIGITS] = {0}, digit = 0, count = 0;
    for (int64_t g = 0; g < row->num_groups; g++)
        for (int b = 0; b < GROUP_BLOCKS; b++)
            counts[key_of(scaled(row, row->groups[g].tops[b])) >> FIRST_SHIFT]++;
    while (digit < DIGITS && count + counts[digit] < k) count += counts[digit++];
    int64_t last = ((digit + 1) << FIRST_SHIFT) - 1;
    return last < 0x7f800000 ? z_of_key((int32_t)last) : -INFINITY;
}

static float top_k_threshold(const logits_row *row, int64_t k) {
    if (k < 1 || k >= row->num_tokens) return -FLT_MAX;
    float threshold = find_threshold(row, bound_of_top_k(row, k), (double)k, 0);
    return threshold > -FLT_MAX ? threshold : -FLT_MAX;
}

/* The groups' masses are those of the tokens at or above `threshold`. */
static float top_p_threshold(const logits_row *row, float threshold, float top_p) {
    int64_t total = 0;
    for (int64_t g = 0; g < row->num_groups; g++) total += row->groups[g].mass;
    double needed = (double)top_p * (double)total;
    /* If no token below the bound weighs more than `each`, all of them may be left out. The margin is for rounding. */
    double each = ((double)total - needed) / (double)row->num_tokens;
    float bound = each > 0 ? (float)(log(each * 0x1p-29) - 1e-3) : -INFINITY;
    bound = bound > MASSLESS ? bound : MASSLESS;
    return find_threshold(row, bound > threshold ? bound : threshold, needed, 1);
}

INLINE winner better(winner a, winner b) {
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
}

/* For each block of a group: with half a word below this, every token's score is below `best`. A token at or below the
   block's top z needs noise of best - z; -log(u) >= 1 - u, and margins for rounding. */
INLINE void halves_needed(const logits_row *row, const float *tops, double best, int32_t needed[GROUP_BLOCKS]) {
    for (int i = 0; i < GROUP_BLOCKS; i += LANES) {
        vf may_lack = mass_of(vector_z(row, tops + i) - (float)best) * (1.0001f * 4); /* of 2^31 */
        vf half = vmax(splat(0x1p31f - 512) - may_lack, splat(0.0f));
        vi whole = __builtin_convertvector(half, vi);
        memcpy(needed + i, &whole, sizeof whole);
    }
}

/* Scores those tokens of one block that are at or above the threshold and have noise enough. */
static winner score_block(const logits_row *row, int64_t first, float threshold, int32_t half_needed, winner best) {
    uint32_t words[4][PHILOX_BLOCKS];
    philox_blocks(words, row->seed, row->position, (uint32_t)(first / 4));
    vi is_any = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        vu word;
        memcpy(&word, &words[0][0] + i, sizeof word);
        is_any |= (vi)(word >> 1) >= half_needed;
    }
    if (!any_lane(is_any)) return best;
    int64_t n = row->num_tokens - first < BLOCK ? row->num_tokens - first : BLOCK;
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = words[i % 4][i / 4];
        if ((int32_t)(word >> 1) < half_needed) continue;
        float z = scaled(row, row->logits[first + i]);
        if (z >= threshold) best = better(best, (winner){(double)z + gumbel(word), first + i});
    }
    return best;
}

static winner score_group(const logits_row *row, int64_t group, float threshold, winner best) {
    const float *tops = row->groups[group].tops;
    int32_t half_needed[GROUP_BLOCKS];
    halves_needed(row, tops, best.score, half_needed);
    for (int b = 0; b < GROUP_BLOCKS; b++) {
        float top = scaled(row, tops[b]);
        if (top >= threshold && (double)top + MAX_GUMBEL >= best.score)
            best = score_block(row, group * GROUP + b * BLOCK, threshold, half_needed[b], best);
    }
    return best;
}

/* The largest token is above every threshold. */
static winner score_top(const logits_row *row) {
    uint32_t words[4][PHILOX_BLOCKS];
    philox_blocks(words, row->seed, row->position, (uint32_t)(row->top_id / 4));
    return (winner){gumbel(words[row->top_id % 4][0]), row->top_id};
}

/* The largest logit and its first index; -1 where a logit is NaN or none is above -inf. */
static void find_top(logits_row *row) {
    row->top = -INFINITY;
    int is_nan = 0;
    for (int64_t g = 0; g < row->num_groups; g++) {
        is_nan |= row->groups[g].tops[0] != row->groups[g].tops[0];
        for (int b = 0; b < GROUP_BLOCKS; b++)
            if (row->groups[g].tops[b] > row->top) row->top = row->groups[g].tops[b], row->top_id = g * GROUP + b * BLOCK;
    }
    if (is_nan || row->top == -INFINITY) row->top_id = -1;
    else
        while (row->logits[row->top_id] != row->top) row->top_id++;
}

/* The whole team calls it; a thread looks at its part of the groups. */
static void sample_row(const sampling_args *a, int64_t index, float *values, team *t) {
    int64_t num_groups = num_groups_of(a->vocab_size);
    int64_t start = part_start(t, num_groups), end = part_end(t, num_groups);
    logits_row row = {.logits = a->logits + index * a->row_stride,
                      .groups = a->scratch + index * num_groups,
                      .values = values,
                      .num_tokens = a->vocab_size,
                      .num_groups = num_groups,
                      .scale = 1.0f / a->temperature[index],
                      .seed = (uint64_t)a->seeds[index],
                      .position = (uint64_t)a->positions[index]};
    for (int64_t g = start; g < end; g++) scan_group(row.logits, row.num_tokens, g * GROUP, row.groups[g].tops);
    team_barrier(t);
    find_top(&row);
    if (row.top_id < 0 || !isfinite(row.top) || !isfinite(row.scale) || !(row.scale > 0)) {
        if (t->thread == 0) a->ids[index] = row.top_id;
        return;
    }
    float threshold = top_k_threshold(&row, a->top_k[index]);
    if (a->top_p[index] < 1) {
        for (int64_t g = start; g < end; g++) row.groups[g].mass = group_mass(&row, g, threshold);
        team_barrier(t);
        threshold = top_p_threshold(&row, threshold, a->top_p[index]);
    }
    float min_p = a->min_p[index], log_min_p = min_p > 0 ? (float)exact_log(min_p) : -INFINITY;
    log_min_p = log_min_p < 0 ? log_min_p : 0;
    if (log_min_p > threshold) threshold = log_min_p;
    winner best = score_top(&row);
    for (int64_t g = start; g < end; g++) row.groups[g].best = best = score_group(&row, g, threshold, best);
    team_barrier(t);
    if (t->thread) return;
    for (int64_t g = 0; g < num_groups; g++) best = better(best, row.groups[g].best);
    a->ids[index] = best.id;
}

_Static_assert(BLOCK + LANES <= GROUP, "gather writes so far behind a row");

/* A thread takes whole rows, unless rows are so few that threads had none. */
int sample(const sampling_args *a, team *t) {
    float *values = a->values + t->thread * (a->vocab_size + GROUP);
    if (2 * a->num_rows <= t->num_threads) {
        for (int64_t row = 0; row < a->num_rows; row++) sample_row(a, row, values, t);
        return 0;
    }
    team_shared own = {0};
    team alone = {0, 1, 0, &own};
    for (int64_t row = next_item(t); row < a->num_rows; row = next_item(t)) sample_row(a, row, values, &alone);
    return 0;
}

/* Noise for tests: one value per (seed, position, id). */
void gumbel_noise(double *out, const int64_t *seeds, const int64_t *positions, const int64_t *ids, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4][PHILOX_BLOCKS];
        philox_blocks(words, (uint64_t)seeds[i], (uint64_t)positions[i], (uint32_t)(ids[i] / 4));
        out[i] = gumbel(words[ids[i] % 4][0]);
    }
}
