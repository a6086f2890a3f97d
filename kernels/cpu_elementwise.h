/* Normalisation, gated activations and rotary embedding for one element type.

ELEMENT, LOAD, STORE, NAME(x) and WIDTH (elements that the KV cache keeps together) come from the including file.
Strides are in elements. */
#include <math.h>

#include "cpu_vector.h"

typedef struct {
    void *q, *k;
    const void *v;
    void *k_cache, *v_cache;
    const float *cos, *sin;
    const int32_t *page_table, *row_of, *positions;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, page_size, max_pages;
    int64_t q_stride, k_stride, v_stride, num_threads;
} rotary_args;

#define PRAGMA(text) _Pragma(#text)
#define PARALLEL_ROWS(elements) \
    PRAGMA(omp parallel for schedule(static) num_threads(num_threads) if ((elements) >= 65536))

/* The weight has the elements' type, or is fp32 where `is_f32`. */
INLINE void NAME(normalise)(ELEMENT *out, const ELEMENT *x, const void *weight, int is_f32, int64_t size, float sum,
                            float eps) {
    vf scale = splat(1.0f / sqrtf(sum / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t n = size - i;
        vf w = is_f32 ? load_f32((const float *)weight + i, n) : LOAD((const ELEMENT *)weight + i, n);
        STORE(out + i, LOAD(x + i, n) * scale * w, n);
    }
}

void NAME(rms_norm)(ELEMENT *out, const ELEMENT *x, const void *weight, int is_f32, int64_t rows, int64_t size,
                    float eps, int num_threads) {
    PARALLEL_ROWS(rows * size)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *from = x + row * size;
        vf sum = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            vf value = LOAD(from + i, size - i);
            sum += value * value;
        }
        NAME(normalise)(out + row * size, from, weight, is_f32, size, sum_lanes(sum), eps);
    }
}

void NAME(add_rms_norm)(ELEMENT *out, const ELEMENT *x, ELEMENT *residual, const void *weight, int is_f32,
                        int64_t rows, int64_t size, float eps, int num_threads) {
    PARALLEL_ROWS(rows * size)
    for (int64_t row = 0; row < rows; row++) {
        ELEMENT *into = residual + row * size;
        vf sum = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            STORE(into + i, LOAD(x + row * size + i, size - i) + LOAD(into + i, size - i), size - i);
            vf value = LOAD(into + i, size - i);
            sum += value * value;
        }
        NAME(normalise)(out + row * size, into, weight, is_f32, size, sum_lanes(sum), eps);
    }
}

void NAME(silu_and_mul)(ELEMENT *out, const ELEMENT *x, int64_t rows, int64_t size, int num_threads) {
    PARALLEL_ROWS(rows * size)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *gates = x + row * 2 * size, *ups = gates + size;
        for (int64_t i = 0; i < size; i += LANES) {
            vf gate = LOAD(gates + i, size - i), up = LOAD(ups + i, size - i);
            STORE(out + row * size + i, gate / (1.0f + vexp(-gate)) * up, size - i);
        }
    }
}

void NAME(gelu_tanh_and_mul)(ELEMENT *out, const ELEMENT *x, int64_t rows, int64_t size, int num_threads) {
    PARALLEL_ROWS(rows * size)
    for (int64_t row = 0; row < rows; row++) {
        const ELEMENT *gates = x + row * 2 * size, *ups = gates + size;
        for (int64_t i = 0; i < size; i += LANES) {
            vf gate = LOAD(gates + i, size - i), up = LOAD(ups + i, size - i);
            vf inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate); /* sqrt(2 / pi) */
            STORE(out + row * size + i, gate / (1.0f + vexp(-2.0f * inner)) * up, size - i); /* (1 + tanh) / 2 */
        }
    }
}

INLINE void NAME(rotate)(ELEMENT *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t n = half - i;
        vf low = LOAD(head + i, n), high = LOAD(head + half + i, n);
        vf c = load_f32(cos + i, n), s = load_f32(sin + i, n);
        STORE(head + i, low * c - high * s, n);
        STORE(head + half + i, high * c + low * s, n);
    }
}

INLINE void NAME(store_token)(const ELEMENT *k, const ELEMENT *v, ELEMENT *k_cache, ELEMENT *v_cache, int64_t slot,
                              int64_t page_size, int64_t head_dim) {
    int64_t v_width = page_size < WIDTH ? page_size : WIDTH;
    for (int64_t d = 0; d < head_dim; d += WIDTH)
        memcpy(k_cache + d * page_size + slot * WIDTH, k + d, WIDTH * sizeof(ELEMENT));
    ELEMENT *to = v_cache + slot / v_width * head_dim * v_width + slot % v_width;
    for (int64_t d = 0; d < head_dim; d++) to[d * v_width] = v[d];
}

void NAME(rotary_and_store)(const rotary_args *a) {
    ELEMENT *q = a->q, *k = a->k, *k_cache = a->k_cache, *v_cache = a->v_cache;
    const ELEMENT *v = a->v;
    int64_t tokens = a->num_tokens, heads = a->num_heads, kv_heads = a->num_kv_heads, head_dim = a->head_dim;
    int64_t page_size = a->page_size, half = a->rotary_dim / 2, num_threads = a->num_threads;
    (void)num_threads; /* unused without OpenMP */
    PARALLEL_ROWS(tokens * (heads + 2 * kv_heads) * head_dim)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cos = a->cos + t * a->rotary_dim, *sin = a->sin + t * a->rotary_dim;
        int64_t position = a->positions[t];
        int64_t page = a->page_table[a->row_of[t] * a->max_pages + position / page_size];
        for (int64_t h = 0; h < heads; h++) NAME(rotate)(q + t * a->q_stride + h * head_dim, cos, sin, half);
        for (int64_t g = 0; g < kv_heads; g++) {
            ELEMENT *key = k + t * a->k_stride + g * head_dim;
            int64_t offset = (page * kv_heads + g) * page_size * head_dim;
            NAME(rotate)(key, cos, sin, half);
            NAME(store_token)(key, v + t * a->v_stride + g * head_dim, k_cache + offset, v_cache + offset,
                              position % page_size, page_size, head_dim);
        }
    }
}
