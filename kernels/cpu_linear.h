/* Linear layers, y = x W^T + b, for one element type and each weight format. Contracts: linear.py and its neighbours.

Weights lie in panels of PANEL columns (outputs), the last one padded with zeros, each panel behind the other over the
whole inner dimension, so that a thread streams it. A block of ROWS tokens keeps its sums in registers (Goto and van de
Geijn, 2008, without packing x: the inner dimensions are short enough for it to stay in cache). A row's sums do not
depend on the number of rows. */
#include "cpu_pairs.h"
#include "cpu_team.h"

#define VECTORS 3
#define PANEL (VECTORS * LANES)
#define AHEAD 4096 /* bytes; hardware prefetching alone keeps too few lines on their way when unpacking is between */
#define GROUP 32 /* inner indices that share a scale */
#define DENSE_RUN 128
#if LANES == 16 || defined(__aarch64__)
#define DENSE_ROWS 8
#define GROUPED_ROWS 4
#else
#define DENSE_ROWS 4
#define GROUPED_ROWS 4
#endif
#define UNROLL _Pragma("GCC unroll 8")
#define EACH_ROW UNROLL for (int i = 0; i < num_rows; i++)
#define EACH_VECTOR UNROLL for (int n = 0; n < VECTORS; n++)

/* x [T, K], out [T, N] of elements, or of floats where `is_out_f32`; bias [N] of elements or NULL. */
typedef struct {
    const void *x, *weight, *scales, *bias;
    void *out;
    float *sums; /* int4: room for [T, K / GROUP] */
    int64_t num_rows, out_features, in_features, is_out_f32;
} linear_args;

INLINE int64_t num_panels(int64_t out_features) { return (out_features + PANEL - 1) / PANEL; }

/* Items are panels, cut by rows too where there are few panels a thread. */
INLINE int64_t rows_per_item(int64_t num_rows, int64_t panels, const team *t) {
    int64_t cuts = t->num_threads == 1 ? 1 : (4 * t->num_threads + panels - 1) / panels;
    int64_t rows = (num_rows + cuts - 1) / cuts;
    return (rows + DENSE_ROWS - 1) / DENSE_ROWS * DENSE_ROWS;
}

INLINE void NAME(store_sums)(void *out, const void *bias, int64_t is_out_f32, int64_t out_features, int64_t row,
                             int64_t column, vf sum) {
    int64_t left = out_features - column, at = row * out_features + column;
    if (left <= 0) return;
    if (bias) sum += LOAD((const ELEMENT *)bias + column, left);
    if (is_out_f32) store_f32((float *)out + at, sum, left);
    else STORE((ELEMENT *)out + at, sum, left);
}
/* One piece of code for all numbers of rows: inlined, it would be most of the library, and of the time to build it. */
static __attribute__((noinline)) void NAME(store_block)(void *out, const void *bias, int64_t is_out_f32,
                                                        int64_t out_features, int64_t num_rows, int64_t row,
                                                        int64_t panel, vf (*sums)[VECTORS]) {
    for (int64_t i = 0; i < num_rows; i++)
        for (int n = 0; n < VECTORS; n++)
            NAME(store_sums)(out, bias, is_out_f32, out_features, row + i, panel * PANEL + n * LANES, sums[i][n]);
}
/* A copy, because sums whose address is taken would not stay in registers. */
#define STORE_BLOCK(a, sum) \
    vf stored[DENSE_ROWS][VECTORS]; \
    EACH_VECTOR EACH_ROW stored[i][n] = sum; \
    NAME(store_block)(a->out, a->bias, a->is_out_f32, a->out_features, num_rows, row, panel, stored);

/* Floats are summed DENSE_RUN inner indices at a time, and the sums of the runs then: where one product is very large,
   all that are added behind it lose digits. */
INLINE void NAME(dense_block)(int num_rows, const linear_args *a, int64_t row, int64_t panel) {
    int64_t size = a->in_features, run = WIDTH == 1 && size > DENSE_RUN ? DENSE_RUN : size;
    const ELEMENT *x = (const ELEMENT *)a->x + row * size, *w = (const ELEMENT *)a->weight + panel * PANEL * size;
    vf stored[DENSE_ROWS][VECTORS];
    for (int64_t start = 0; start < size; start += run) {
        int64_t end = start + run < size ? start + run : size;
        vf sums[DENSE_ROWS][VECTORS];
        EACH_ROW EACH_VECTOR sums[i][n] = splat(0);
#pragma GCC unroll 1
        for (int64_t k = start; k < end; k += 2, w += 2 * PANEL) {
            pair weights[VECTORS];
            EACH_VECTOR weights[n] = load_dense(w + n * 2 * LANES);
            EACH_ROW {
                pair factor = broadcast_pair(x + i * size + k);
                EACH_VECTOR sums[i][n] = multiply_add(sums[i][n], factor, weights[n]);
            }
        }
        EACH_VECTOR EACH_ROW stored[i][n] = start ? stored[i][n] + sums[i][n] : sums[i][n];
    }
    NAME(store_block)(a->out, a->bias, a->is_out_f32, a->out_features, num_rows, row, panel, stored);
}

/* A group of a panel has the half-precision scales `d` of each column, then (int4) the offsets `m`: a weight is
   d * q + m, int8's d * q. int4: 16-bit words, two a column, each with one inner index of four pairs in a row. */
INLINE void NAME(int4_block)(int num_rows, const linear_args *a, int64_t row, int64_t panel) {
    int64_t size = a->in_features, num_groups = size / GROUP;
    const ELEMENT *x = (const ELEMENT *)a->x + row * size;
    const uint8_t *w = (const uint8_t *)a->weight + panel * PANEL * size / 2;
    const uint16_t *scales = (const uint16_t *)a->scales + panel * num_groups * 2 * PANEL;
    const float *x_sums = a->sums + row * num_groups;
    vf sums[GROUPED_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[i][n] = splat(0);
    for (int64_t g = 0; g < num_groups; g++, scales += 2 * PANEL) {
        vf group[GROUPED_ROWS][VECTORS];
        EACH_ROW EACH_VECTOR group[i][n] = splat(0);
#pragma GCC unroll 1
        for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 8, w += 4 * PANEL)
            UNROLL for (int quarter = 0; quarter < 4; quarter++) {
                pair weights[VECTORS];
                EACH_VECTOR weights[n] = unpack_int4(w + n * 4 * LANES, quarter);
                if (quarter < VECTORS) __builtin_prefetch(w + AHEAD + quarter * 4 * LANES, 0, 2);
                EACH_ROW {
                    pair factor = broadcast_pair(x + i * size + k + 2 * quarter);
                    EACH_VECTOR group[i][n] = multiply_add(group[i][n], factor, weights[n]);
                }
            }
        EACH_VECTOR {
            vf d = load_f16(scales + n * LANES), m = load_f16(scales + PANEL + n * LANES) - INT4_BIAS * d;
            EACH_ROW sums[i][n] += group[i][n] * d + m * x_sums[i * num_groups + g];
        }
    }
    STORE_BLOCK(a, sums[i][n])
}

INLINE void NAME(int8_block)(int num_rows, const linear_args *a, int64_t row, int64_t panel) {
    int64_t size = a->in_features, num_groups = size / GROUP;
    const ELEMENT *x = (const ELEMENT *)a->x + row * size;
    const int8_t *w = (const int8_t *)a->weight + panel * PANEL * size;
    const uint16_t *scales = (const uint16_t *)a->scales + panel * num_groups * PANEL;
    vf sums[GROUPED_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR sums[i][n] = splat(0);
    for (int64_t g = 0; g < num_groups; g++, scales += PANEL) {
        vf group[GROUPED_ROWS][VECTORS];
        EACH_ROW EACH_VECTOR group[i][n] = splat(0);
#pragma GCC unroll 2
        for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 2, w += 2 * PANEL) {
            pair weights[VECTORS];
            EACH_VECTOR weights[n] = unpack_int8(w + n * 2 * LANES);
            EACH_ROW {
                pair factor = broadcast_pair(x + i * size + k);
                EACH_VECTOR group[i][n] = multiply_add(group[i][n], factor, weights[n]);
            }
        }
        EACH_VECTOR {
            vf d = load_f16(scales + n * LANES);
            EACH_ROW sums[i][n] += group[i][n] * d;
        }
    }
    STORE_BLOCK(a, sums[i][n])
}

#define FOR_UP_TO_4(num_rows, block) \
    switch (num_rows) { \
    case 1: block(1, a, row, panel); break; \
    case 2: block(2, a, row, panel); break; \
    case 3: block(3, a, row, panel); break; \
    default: block(4, a, row, panel); break; \
    }
#define FOR_UP_TO_8(num_rows, block) \
    switch (num_rows) { \
    case 1: block(1, a, row, panel); break; \
    case 2: block(2, a, row, panel); break; \
    case 3: block(3, a, row, panel); break; \
    case 4: block(4, a, row, panel); break; \
    case 5: block(5, a, row, panel); break; \
    case 6: block(6, a, row, panel); break; \
    case 7: block(7, a, row, panel); break; \
    default: block(8, a, row, panel); break; \
    }
#if DENSE_ROWS == 8
#define FOR_DENSE_ROWS FOR_UP_TO_8
#define FOR_GROUPED_ROWS FOR_UP_TO_4
#else
#define FOR_DENSE_ROWS FOR_UP_TO_4
#define FOR_GROUPED_ROWS FOR_UP_TO_4
#endif

#define RUN_BLOCKS(a, t, block_rows, for_rows, block) \
    int64_t panels = num_panels(a->out_features), rows_each = rows_per_item(a->num_rows, panels, t); \
    int64_t num_cuts = (a->num_rows + rows_each - 1) / rows_each; \
    for (int64_t item; (item = next_near_item(t, panels * num_cuts)) >= 0;) { \
        int64_t panel = item / num_cuts, first = item % num_cuts * rows_each; \
        int64_t end = first + rows_each < a->num_rows ? first + rows_each : a->num_rows; \
        for (int64_t row = first; row < end; row += block_rows) for_rows(end - row, block) \
    }

int NAME(linear_dense)(const linear_args *a, team *t) {
    if (a->num_rows == 0) return 0;
    RUN_BLOCKS(a, t, DENSE_ROWS, FOR_DENSE_ROWS, NAME(dense_block))
    return 0;
}

INLINE void NAME(sum_groups)(const linear_args *a, int64_t row) {
    int64_t size = a->in_features;
    const ELEMENT *x = (const ELEMENT *)a->x + row * size;
    for (int64_t g = 0; g < size / GROUP; g++) {
        vf sum = {0};
        for (int64_t k = 0; k < GROUP; k += LANES) sum += LOAD(x + g * GROUP + k, LANES);
        a->sums[row * (size / GROUP) + g] = sum_lanes(sum);
    }
}

int NAME(linear_int4)(const linear_args *a, team *t) {
    if (a->num_rows == 0) return 0;
    for (int64_t row = part_start(t, a->num_rows); row < part_end(t, a->num_rows); row++) NAME(sum_groups)(a, row);
    team_barrier(t);
    RUN_BLOCKS(a, t, GROUPED_ROWS, FOR_GROUPED_ROWS, NAME(int4_block))
    return 0;
}

int NAME(linear_int8)(const linear_args *a, team *t) {
    if (a->num_rows == 0) return 0;
    RUN_BLOCKS(a, t, GROUPED_ROWS, FOR_GROUPED_ROWS, NAME(int8_block))
    return 0;
}

#include "cpu_linear_w8a8.h"

int num_lanes(void) { return LANES; }
