/* Penalties, logit bias and grammar bitmasks, on logits in place. Contract: logits.py, with whose references' bits these
   agree: products and sums are not contracted. */
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <math.h>

#include "cpu_team.h"
#include "cpu_vector.h"

#define BITS 32
#define PIECE 8192 /* tokens of a row that a thread masks at a time */
#define OUT_OF_RANGE 1

typedef struct {
    float *logits;
    const int32_t *starts, *ends, *token_ids;
    const void *values; /* output counts, or biases */
    const float *repetition, *frequency, *presence;
    int64_t num_rows, vocab_size, row_stride;
} sparse_args;

typedef struct {
    float *logits;
    const int32_t *bitmask, *mask_of;
    int64_t num_rows, vocab_size, row_stride, num_masks;
} bitmask_args;

/* Where entry i's logit lies; NULL where there is no such token. */
INLINE float *logit_of(const sparse_args *a, int64_t row, int64_t i) {
    int64_t id = a->token_ids[i];
    return id >= 0 && id < a->vocab_size ? a->logits + row * a->row_stride + id : 0;
}

int apply_penalties(const sparse_args *a, team *t) {
    const int32_t *counts = a->values;
    for (int64_t row = next_item(t); row < a->num_rows; row = next_item(t)) {
        float repetition = a->repetition[row], frequency = a->frequency[row], presence = a->presence[row];
        for (int64_t i = a->starts[row]; i < a->ends[row]; i++) {
            float *logit = logit_of(a, row, i);
            if (!logit) return OUT_OF_RANGE;
            float x = *logit > 0 ? *logit / repetition : *logit * repetition;
            x -= frequency * (float)counts[i];
            *logit = counts[i] > 0 ? x - presence : x;
        }
    }
    return 0;
}

int apply_logit_bias(const sparse_args *a, team *t) {
    const float *biases = a->values;
    for (int64_t row = next_item(t); row < a->num_rows; row = next_item(t))
        for (int64_t i = a->starts[row]; i < a->ends[row]; i++) {
            float *logit = logit_of(a, row, i);
            if (!logit) return OUT_OF_RANGE;
            *logit += biases[i];
        }
    return 0;
}

static void mask_word(float *logits, int64_t num_tokens, uint32_t allowed) {
    vi bit = lane_numbers();
    for (int64_t i = 0; i < BITS && i < num_tokens; i += LANES, bit += LANES) {
        vi is_allowed = (((vi){0} + (int32_t)allowed) >> bit & 1) != 0;
        vf x = load_f32(logits + i, num_tokens - i);
        store_f32(logits + i, choose(is_allowed, x, splat(-INFINITY)), num_tokens - i);
    }
}

int apply_token_bitmask(const bitmask_args *a, team *t) {
    int64_t pieces = (a->vocab_size + PIECE - 1) / PIECE, num_words = (a->vocab_size + BITS - 1) / BITS;
    for (int64_t item = next_item(t); item < a->num_rows * pieces; item = next_item(t)) {
        int64_t row = item / pieces, mask = a->mask_of[row], first = item % pieces * PIECE;
        if (mask < 0) continue;
        if (mask >= a->num_masks) return OUT_OF_RANGE;
        int64_t end = first + PIECE < a->vocab_size ? first + PIECE : a->vocab_size;
        const int32_t *words = a->bitmask + mask * num_words;
        for (int64_t token = first; token < end; token += BITS)
            if (words[token / BITS] != -1)
                mask_word(a->logits + row * a->row_stride + token, end - token, (uint32_t)words[token / BITS]);
    }
    return 0;
}
