/* Linear layers on int8 weights, one scale a column, and activations that are quantised here, one scale a row.

Activations are stored as x / scale + 128 in a byte, because the dot-product instruction multiplies unsigned bytes with
signed ones; 128 times the column's sum is taken out again. The inner dimension is in fours. Sums are exact integers.
Before that, blocks of a row are rotated (linear_w8a8.py says why). */
#define MAX_BLOCK 64

typedef struct {
    const void *x;
    const int8_t *weight; /* [panels, K / 4, PANEL, 4] */
    const float *scales;  /* [panels, PANEL] */
    const int32_t *column_sums; /* [panels, PANEL]: 128 times the sum of a column's weights */
    const void *bias;
    void *out;
    uint8_t *quantised; /* room for [T, K] */
    float *x_scales;    /* room for [T] */
    float *rotated;     /* room for a row of each thread */
    int64_t num_rows, out_features, in_features, is_out_f32, block;
} w8a8_args;

/* x[i] +- x[i ^ distance] for lanes in pairs: a butterfly inside a vector. The sign is a factor, for one fused
   multiply-add. */
INLINE vf mix_lanes(vf x, int distance) {
    vi lanes = lane_numbers();
    vf sign = __builtin_convertvector(1 - 2 * ((lanes & distance) != 0 & 1), vf);
#if defined(__clang__)
    vf other;
    for (int i = 0; i < LANES; i++) other[i] = x[i ^ distance];
#else
    vf other = __builtin_shuffle(x, lanes ^ distance);
#endif
    return x * sign + other;
}

/* Hadamard's transform of each `block` numbers (a power of two up to MAX_BLOCK that divides `size`), not normalised.
   Returns the bits of the largest magnitude: as integers, those of infinity and NaN are above all others. */
INLINE vi NAME(rotate_row)(const ELEMENT *x, int64_t size, int64_t block, float *to) {
    vi most = {0};
    for (int64_t k = 0; k < size; k += MAX_BLOCK) {
        vf v[MAX_BLOCK / LANES];
        UNROLL for (int i = 0; i < MAX_BLOCK / LANES; i++) {
            int64_t left = block == MAX_BLOCK ? LANES : size - k - i * LANES;
            v[i] = left > 0 ? LOAD(x + k + i * LANES, left) : splat(0);
            UNROLL for (int distance = 1; distance < LANES; distance *= 2)
                if (distance < block) v[i] = mix_lanes(v[i], distance);
        }
        UNROLL for (int step = 1; step < MAX_BLOCK / LANES; step *= 2)
            if (step * LANES < block)
                UNROLL for (int i = 0; i < MAX_BLOCK / LANES; i++)
                    if (!(i & step)) {
                        vf low = v[i], high = v[i | step];
                        v[i] = low + high;
                        v[i | step] = low - high;
                    }
        UNROLL for (int i = 0; i < MAX_BLOCK / LANES; i++) {
            int64_t left = block == MAX_BLOCK ? LANES : size - k - i * LANES;
            vi magnitude = (vi)v[i] & 0x7fffffff;
            most = (vi)choose(magnitude > most, (vf)magnitude, (vf)most);
            if (left > 0) store_f32(to + k + i * LANES, v[i], left);
        }
    }
    return most;
}

INLINE void NAME(quantise_row)(const w8a8_args *a, int64_t row, float *x) {
    int64_t size = a->in_features;
    const ELEMENT *from = (const ELEMENT *)a->x + row * size;
    vf most = (vf)(a->block == MAX_BLOCK ? NAME(rotate_row)(from, size, MAX_BLOCK, x)
                                         : NAME(rotate_row)(from, size, a->block, x));
    int32_t bits = 0;
    float largest;
    for (int i = 0; i < LANES; i++) bits = ((vi)most)[i] > bits ? ((vi)most)[i] : bits;
    memcpy(&largest, &bits, sizeof largest);
    float inverse = largest > 0 ? 127.0f / largest : 0;
    a->x_scales[row] = largest / 127.0f + (largest - largest); /* NaN and infinity make the whole row NaN */
    uint8_t *to = a->quantised + row * size;
    for (int64_t k = 0; k < size; k += LANES) {
        /* 1.5 * 2^23 + 128: adding it rounds to an integer in the low bits, of which the lowest byte counts */
        vi bits = (vi)(load_f32(x + k, size - k) * inverse + 12583040.0f);
        vb bytes = __builtin_convertvector(bits, vb);
        if (size - k >= LANES) memcpy(to + k, &bytes, LANES);
        else memcpy(to + k, &bytes, size - k);
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
    int64_t size = a->in_features;
    const uint8_t *x = a->quantised + row * size;
    const int8_t *w = a->weight + panel * PANEL * size;
    vi sums[DENSE_ROWS][VECTORS];
    EACH_VECTOR {
        vi start;
        memcpy(&start, a->column_sums + panel * PANEL + n * LANES, sizeof start);
        EACH_ROW sums[i][n] = -start;
    }
#pragma GCC unroll 1
    for (int64_t k = 0; k < size; k += 4, w += 4 * PANEL) {
        vi weights[VECTORS];
        EACH_VECTOR memcpy(&weights[n], w + n * 4 * LANES, sizeof weights[n]);
        EACH_ROW {
            uint32_t factor;
            memcpy(&factor, x + i * size + k, 4);
            EACH_VECTOR sums[i][n] = add_products(sums[i][n], factor, weights[n]);
        }
    }
    vf scales[VECTORS];
    EACH_VECTOR scales[n] = load_f32(a->scales + panel * PANEL + n * LANES, LANES);
    STORE_BLOCK(a, __builtin_convertvector(sums[i][n], vf) * scales[n] * a->x_scales[row + i])
}

int NAME(linear_w8a8)(const w8a8_args *a, team *t) {
    if (a->num_rows == 0) return 0;
    for (int64_t row = part_start(t, a->num_rows); row < part_end(t, a->num_rows); row++)
        NAME(quantise_row)(a, row, a->rotated + t->thread * a->in_features);
    team_barrier(t);
    RUN_BLOCKS(a, t, DENSE_ROWS, FOR_DENSE_ROWS, NAME(w8a8_block))
    return 0;
}
