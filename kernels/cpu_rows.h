/* A row of logits in blocks: the largest logit of each says which blocks need not be read again. */
#ifndef CPU_ROWS_H
#define CPU_ROWS_H

#include <math.h>

#include "cpu_vector.h"

#define BLOCK 64          /* tokens */
#define GROUP_BLOCKS 16   /* blocks whose largest logits are kept together */
#define GROUP (BLOCK * GROUP_BLOCKS)

INLINE int64_t num_groups_of(int64_t num_tokens) { return (num_tokens + GROUP - 1) / GROUP; }

INLINE int any_lane(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
#endif
}

/* Appends the lanes of x that the mask names; up to LANES values behind them may be overwritten. Returns the new count. */
INLINE int64_t append_lanes(float *values, int64_t count, vf x, vi mask) {
#if defined(__AVX512F__)
    __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(lanes, (__m512)x));
    return count + __builtin_popcount(lanes);
#else
    for (int i = 0; i < LANES; i++) {
        values[count] = x[i];
        count -= mask[i];
    }
    return count;
#endif
}

/* The block that starts at token `first`, filled up with -inf in `padded` where the row ends inside it. */
INLINE const float *block_at(const float *logits, int64_t num_tokens, int64_t first, float *padded) {
    if (num_tokens - first >= BLOCK) return logits + first;
    for (int64_t i = 0; i < BLOCK; i++) padded[i] = first + i < num_tokens ? logits[first + i] : -INFINITY;
    return padded;
}

/* The largest logit of each block of the group that starts at token `first`, -inf for a block behind the row's end.
   Where a logit is NaN, the first is NaN. */
static void scan_group(const float *logits, int64_t num_tokens, int64_t first, float tops[GROUP_BLOCKS]) {
    float padded[BLOCK];
    vi is_nan = {0};
    for (int b = 0; b < GROUP_BLOCKS; b++, first += BLOCK) {
        const float *x = block_at(logits, num_tokens, first, padded);
        vf top = splat(-INFINITY);
        for (int i = 0; i < BLOCK; i += LANES) {
            vf value = load_f32(x + i, LANES);
            is_nan |= value != value;
            top = vmax(value, top);
        }
        tops[b] = max_lanes(top);
    }
    if (any_lane(is_nan)) tops[0] = NAN;
}

#endif
