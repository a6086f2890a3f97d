/* Normalisation, gated activations, rows of tables and rotary embedding for one element type.

ELEMENT, LOAD, STORE, NAME(x) and WIDTH (elements that the KV cache keeps together) come from the including file.
Strides are in elements. */
#include <math.h>

#include "cpu_team.h"
#include "cpu_vector.h"

/* out [rows, size]; x's row r is head r % heads of token r / heads, tokens `token_stride` apart; residual is
   contiguous. The weight has the elements' type, or is fp32. */
typedef struct {
    void *out;
    const void *x;
    void *residual;
    const void *weight;
    int64_t is_weight_f32, num_rows, size, heads, token_stride;
    float eps;
} norm_args;

INLINE void NAME(normalise)(const norm_args *a, int64_t row, const ELEMENT *x, float sum) {
    vf scale = splat(1.0f / sqrtf(sum / (float)a->size + a->eps));
    ELEMENT *out = (ELEMENT *)a->out + row * a->size;
    for (int64_t i = 0; i < a->size; i += LANES) {
        int64_t n = a->size - i;
        vf w = a->is_weight_f32 ? load_f32((const float *)a->weight + i, n) : LOAD((const ELEMENT *)a->weight + i, n);
        STORE(out + i, LOAD(x + i, n) * scale * w, n);
    }
}

INLINE const ELEMENT *NAME(norm_row)(const norm_args *a, int64_t row) {
    return (const ELEMENT *)a->x + row / a->heads * a->token_stride + row % a->heads * a->size;
}

int NAME(rms_norm)(const norm_args *a, team *t) {
    for (int64_t row = part_start(t, a->num_rows); row < part_end(t, a->num_rows); row++) {
        const ELEMENT *x = NAME(norm_row)(a, row);
        vf sum = {0};
        for (int64_t i = 0; i < a->size; i += LANES) {
            vf value = LOAD(x + i, a->size - i);
            sum += value * value;
        }
        NAME(normalise)(a, row, x, sum_lanes(sum));
    }
    return 0;
}

int NAME(add_rms_norm)(const norm_args *a, team *t) {
    for (int64_t row = part_start(t, a->num_rows); row < part_end(t, a->num_rows); row++) {
        const ELEMENT *x = NAME(norm_row)(a, row);
        ELEMENT *into = (ELEMENT *)a->residual + row * a->size;
        vf sum = {0};
        for (int64_t i = 0; i < a->size; i += LANES) {
            STORE(into + i, LOAD(x + i, a->size - i) + LOAD(into + i, a->size - i), a->size - i);
            vf value = LOAD(into + i, a->size - i);
            sum += value * value;
        }
        NAME(normalise)(a, row, into, sum_lanes(sum));
    }
    return 0;
}

/* out [rows, size] from x [rows, 2 size]: the gate's elements, then the factors. */
typedef struct {
    void *out;
    const void *x;
    int64_t num_rows, size;
} gated_args;

#define GATED_BLOCK 512 /* elements of a row that one thread takes */

/* Calls `one(out, gate, up, n)` for all vectors of this thread's blocks. */
#define GATED(one) \
    int64_t size = a->size, blocks = (size + GATED_BLOCK - 1) / GATED_BLOCK, count = a->num_rows * blocks; \
    for (int64_t block = part_start(t, count); block < part_end(t, count); block++) { \
        int64_t row = block / blocks, first = block % blocks * GATED_BLOCK; \
        int64_t end = size < first + GATED_BLOCK ? size : first + GATED_BLOCK; \
        const ELEMENT *gates = (const ELEMENT *)a->x + row * 2 * size, *ups = gates + size; \
        ELEMENT *out = (ELEMENT *)a->out + row * size; \
        for (int64_t i = first; i < end; i += LANES) \
            STORE(out + i, one(LOAD(gates + i, end - i), LOAD(ups + i, end - i)), end - i); \
    } \
    return 0;

INLINE vf NAME(silu_mul)(vf gate, vf up) {
    return gate / (1.0f + vexp2(gate * -LOG2E, WIDTH == 2)) * up;
}

INLINE vf NAME(gelu_mul)(vf gate, vf up) {
    vf inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);     /* sqrt(2 / pi) */
    return gate / (1.0f + vexp2(inner * (-2.0f * LOG2E), WIDTH == 2)) * up; /* (1 + tanh) / 2 */
}

int NAME(silu_and_mul)(const gated_args *a, team *t) { GATED(NAME(silu_mul)) }

int NAME(gelu_tanh_and_mul)(const gated_args *a, team *t) { GATED(NAME(gelu_mul)) }

/* out [ids, size] = rows `id - first_id` of the table [rows, size] times `scale`; zeros for ids that it has not. */
typedef struct {
    void *out;
    const void *table;
    const int64_t *ids;
    int64_t num_ids, first_id, num_rows, size;
    float scale;
} rows_args;

int NAME(take_rows)(const rows_args *a, team *t) {
    for (int64_t i = part_start(t, a->num_ids); i < part_end(t, a->num_ids); i++) {
        ELEMENT *to = (ELEMENT *)a->out + i * a->size;
        int64_t row = a->ids[i] - a->first_id;
        const ELEMENT *from = (const ELEMENT *)a->table + row * a->size;
        if (row < 0 || row >= a->num_rows) memset(to, 0, a->size * sizeof(ELEMENT));
        else if (a->scale == 1.0f) memcpy(to, from, a->size * sizeof(ELEMENT));
        else
            for (int64_t j = 0; j < a->size; j += LANES)
                STORE(to + j, LOAD(from + j, a->size - j) * a->scale, a->size - j);
    }
    return 0;
}

/* q, k, v: `stride` between tokens; a token's page is page_table[row_of * table_stride + position / page_size]. */
typedef struct {
    void *q, *k;
    const void *v;
    void *k_cache, *v_cache;
    const float *cos, *sin;
    const int32_t *page_table, *row_of, *positions;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, num_pairs, page_size, table_stride;
    int64_t q_stride, k_stride, v_stride;
} rotary_args;

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

int NAME(rotary_and_store)(const rotary_args *a, team *t) {
    ELEMENT *q = a->q, *k = a->k, *k_cache = a->k_cache, *v_cache = a->v_cache;
    const ELEMENT *v = a->v;
    int64_t head_dim = a->head_dim, page_size = a->page_size, pairs = a->num_pairs;
    for (int64_t i = part_start(t, a->num_tokens); i < part_end(t, a->num_tokens); i++) {
        const float *cos = a->cos + i * pairs, *sin = a->sin + i * pairs;
        int64_t position = a->positions[i];
        int64_t page = a->page_table[a->row_of[i] * a->table_stride + position / page_size];
        for (int64_t h = 0; h < a->num_heads; h++) NAME(rotate)(q + i * a->q_stride + h * head_dim, cos, sin, pairs);
        for (int64_t g = 0; g < a->num_kv_heads; g++) {
            ELEMENT *key = k + i * a->k_stride + g * head_dim;
            int64_t offset = (page * a->num_kv_heads + g) * page_size * head_dim;
            NAME(rotate)(key, cos, sin, pairs);
            NAME(store_token)(key, v + i * a->v_stride + g * head_dim, k_cache + offset, v_cache + offset,
                              position % page_size, page_size, head_dim);
        }
    }
    return 0;
}
