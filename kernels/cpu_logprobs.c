/* Log-probabilities of given and of the likeliest tokens. Contract: logprobs.py. */
#include "cpu_rows.h"
#include "cpu_team.h"

#define LIGHTEST -87.0f /* below the top: e^z is 0 beside a sum of at least 1 */

typedef struct {
    const float *logits;
    const int64_t *ids;
    float *logprobs;
    int64_t *top_ids;
    float *top_logprobs;
    int64_t num_rows, vocab_size, row_stride, num_top;
} logprobs_args;

/* The sum of e^(logit - top): floats within a group, doubles above. */
static double sum_of_exps(const float *logits, int64_t num_tokens, const float *tops, float top) {
    float padded[BLOCK];
    double total = 0;
    for (int64_t g = 0; g < num_groups_of(num_tokens); g++) {
        vf sum = {0};
        for (int b = 0; b < GROUP_BLOCKS; b++) {
            if (tops[g * GROUP_BLOCKS + b] - top < LIGHTEST) continue;
            const float *x = block_at(logits, num_tokens, g * GROUP + b * BLOCK, padded);
            for (int i = 0; i < BLOCK; i += LANES) sum += vexp(load_f32(x + i, LANES) - top);
        }
        total += (double)sum_lanes(sum);
    }
    return total;
}

/* Keeps ids and values of the largest logits so far, falling; ids come rising, so the first of equals stays ahead. */
static void find_largest(const float *logits, int64_t num_tokens, const float *tops, int64_t num_top, int64_t *ids,
                         float *values) {
    int64_t count = 0;
    for (int64_t first = 0; first < num_tokens; first += BLOCK) {
        int64_t end = first + BLOCK < num_tokens ? first + BLOCK : num_tokens;
        if (count == num_top && !(tops[first / BLOCK] > values[num_top - 1])) continue;
        for (int64_t id = first; id < end; id++) {
            float value = logits[id];
            if (count == num_top && !(value > values[num_top - 1])) continue;
            int64_t place = count < num_top ? count++ : num_top - 1;
            for (; place > 0 && values[place - 1] < value; place--)
                values[place] = values[place - 1], ids[place] = ids[place - 1];
            values[place] = value, ids[place] = id;
        }
    }
}

static void row_logprobs(const logprobs_args *a, int64_t row, float *tops) {
    const float *logits = a->logits + row * a->row_stride;
    int64_t *ids = a->top_ids + row * a->num_top, id = a->ids[row], num_groups = num_groups_of(a->vocab_size);
    float *values = a->top_logprobs + row * a->num_top, top = -INFINITY;
    int is_nan = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        scan_group(logits, a->vocab_size, g * GROUP, tops + g * GROUP_BLOCKS);
        is_nan |= tops[g * GROUP_BLOCKS] != tops[g * GROUP_BLOCKS];
    }
    for (int64_t b = 0; b < num_groups * GROUP_BLOCKS; b++) top = tops[b] > top ? tops[b] : top;
    if (is_nan || !isfinite(top)) {
        a->logprobs[row] = NAN;
        for (int64_t k = 0; k < a->num_top; k++) ids[k] = -1, values[k] = NAN;
        return;
    }
    double log_sum = (double)top + log(sum_of_exps(logits, a->vocab_size, tops, top));
    a->logprobs[row] = id >= 0 && id < a->vocab_size ? (float)((double)logits[id] - log_sum) : NAN;
    if (a->num_top > 0) find_largest(logits, a->vocab_size, tops, a->num_top, ids, values);
    for (int64_t k = 0; k < a->num_top; k++) values[k] = (float)((double)values[k] - log_sum);
}

int token_logprobs(const logprobs_args *a, team *t) {
    float tops[num_groups_of(a->vocab_size) * GROUP_BLOCKS]; /* a sixty-fourth of a row */
    for (int64_t row = next_item(t); row < a->num_rows; row = next_item(t)) row_logprobs(a, row, tops);
    return 0;
}
