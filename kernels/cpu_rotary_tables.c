/* Cosines and sines of the rotary embedding. Contract: rotary.py. They are fp32 for a model of any type. */
#include <math.h>

#include "cpu_team.h"

/* cos, sin [tokens, pairs] of position * inv_freq, times `factor`. */
typedef struct {
    float *cos, *sin;
    const int32_t *positions;
    const float *inv_freq;
    int64_t num_tokens, num_pairs;
    float factor;
} tables_args;

int rotary_tables(const tables_args *a, team *t) {
    int64_t count = a->num_tokens * a->num_pairs;
    for (int64_t i = part_start(t, count); i < part_end(t, count); i++) {
        float angle = (float)a->positions[i / a->num_pairs] * a->inv_freq[i % a->num_pairs];
        a->cos[i] = cosf(angle) * a->factor;
        a->sin[i] = sinf(angle) * a->factor;
    }
    return 0;
}
