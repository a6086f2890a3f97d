/* Linear layers on int8 weights, one scale a column, and activations that are quantised here: one scale for each
X_GROUP of a row's numbers (the last one may have fewer), because a few large ones would leave the others no digits.

Activations are stored as x / scale + 128 in a byte, because the dot-product instruction multiplies unsigned bytes with
signed ones; 128 times the sum of the column's weights is taken out again. The inner dimension is in fours. A group's
sums are exact integers. */
#define X_GROUP 64

typedef struct {
    const void *x;
    const int8_t *weight;       /* [panels, K / 4, PANEL, 4] */
    const float *scales;        /* [panels, PANEL] */
    const int16_t *column_sums; /* [panels, groups, PANEL]: the sum of a column's weights in a group */
    const void *bias;
    void *out;
    uint8_t *quantised; /* room for [T, K] */
    float *x_scales;    /* room for [T, groups] */
    int64_t num_rows, out_features, in_features, is_out_f32;
} w8a8_args;

INLINE int64_t num_x_groups(int64_t size) { return (size + X_GROUP - 1) / X_GROUP; }

/* Returns the group's scale; NaN where a number is not finite. */
INLINE float NAME(quantise_group)(const ELEMENT *x, int64_t size, uint8_t *to) {
    vf most = {0}, nan_or_zero = {0};
    for (int64_t k = 0; k < size; k += LANES) {
        vf value = LOAD(x + k, size - k);
        most = vmax(most, vmax(value, -value));
        nan_or_zero += value - value;
    }
    float largest = max_lanes(most), inverse = largest > 0 ? 127.0f / largest : 0;
    for (int64_t k = 0; k < size; k += LANES) {
        /* 1.5 * 2^23 + 128: adding it rounds to an integer in the low bits, of which the lowest byte counts */
        vi bits = (vi)(LOAD(x + k, size - k) * inverse + 12583040.0f);
        vb bytes = __builtin_convertvector(bits, vb);
        if (size - k >= LANES) memcpy(to + k, &bytes, LANES);
        else memcpy(to + k, &bytes, size - k);
    }
    return largest / 127.0f + sum_lanes(nan_or_zero);
}

INLINE void NAME(quantise_row)(const w8a8_args *a, int64_t row) {
    int64_t size = a->in_features, first = row * size;
    float *scales = a->x_scales + row * num_x_groups(size);
    for (int64_t k = 0; k < size; k += X_GROUP) {
        int64_t left = size - k < X_GROUP ? size - k : X_GROUP;
        scales[k / X_GROUP] =
            NAME(quantise_group)((const ELEMENT *)a->x + first + k, left, a->quantised + first + k);
    }
}

#if defined(__AVX512VNNI__)
INLINE vi add_products(vi sum, uint32_t x, vi w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(_mm512_set1_epi32((int)x)), "v"(w));
    return sum;
}
#else
INLINE vi add_products(vi sum, uint32_t x, vi w) {
    for (int byte = 0; byte < 4; byte++) {
        int32_t factor = x >> 8 * byte & 255;
        sum += factor * (vi)((vu)w << (24 - 8 * byte) >> 24 ^ 128) - factor * 128;
    }
    return sum;
}
#endif

INLINE void NAME(w8a8_block)(int num_rows, const w8a8_args *a, int64_t row, int64_t panel) {
    int64_t size = a->in_features, num_groups = num_x_groups(size);
    const uint8_t *x = a->quantised + row * size;
    const int8_t *w = a->weight + panel * PANEL * size;
    const int16_t *column_sums = a->column_sums + panel * num_groups * PANEL;
    vf totals[DENSE_ROWS][VECTORS];
    EACH_ROW EACH_VECTOR totals[i][n] = splat(0);
    for (int64_t g = 0; g < num_groups; g++, column_sums += PANEL) {
        vi sums[DENSE_ROWS][VECTORS];
        EACH_VECTOR {
            vsh start;
            memcpy(&start, column_sums + n * LANES, sizeof start);
            EACH_ROW sums[i][n] = __builtin_convertvector(start, vi) * -128;
        }
        int64_t end = (g + 1) * X_GROUP < size ? (g + 1) * X_GROUP : size;
#pragma GCC unroll 1
        for (int64_t k = g * X_GROUP; k < end; k += 4, w += 4 * PANEL) {
            vi weights[VECTORS];
            EACH_VECTOR memcpy(&weights[n], w + n * 4 * LANES, sizeof weights[n]);
            EACH_ROW {
                uint32_t factor;
                memcpy(&factor, x + i * size + k, 4);
                EACH_VECTOR sums[i][n] = add_products(sums[i][n], factor, weights[n]);
            }
        }
        EACH_ROW EACH_VECTOR totals[i][n] +=
            __builtin_convertvector(sums[i][n], vf) * a->x_scales[(row + i) * num_groups + g];
    }
    vf scales[VECTORS];
    EACH_VECTOR scales[n] = load_f32(a->scales + panel * PANEL + n * LANES, LANES);
    STORE_BLOCK(a, totals[i][n] * scales[n])
}

int NAME(linear_w8a8)(const w8a8_args *a, team *t) {
    if (a->num_rows == 0) return 0;
    for (int64_t row = part_start(t, a->num_rows); row < part_end(t, a->num_rows); row++) NAME(quantise_row)(a, row);
    team_barrier(t);
    RUN_BLOCKS(a, t, DENSE_ROWS, FOR_DENSE_ROWS, NAME(w8a8_block))
    return 0;
}
