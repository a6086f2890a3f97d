/* One tile of keys and values of paged attention for one element type: how it is read, and its two products.

Where the CPU multiplies pairs of bf16 (MULTIPLY_PAIRS) the products run on bf16 factors and fp32 sums, else on floats.
The cache keeps rows of pairs, so a full group of keys is read in place; other groups are copied into that form. */
#include "cpu_attention_plan.h"

#if MULTIPLY_PAIRS
#define FACTOR bf16
#define PAIR 2
#define FACTORS __m512bh
#define LOAD_FACTORS(from) ((__m512bh)_mm512_loadu_si512(from))
#define BROADCAST(from) NAME(broadcast)(from)
#define STORE_FACTORS(to, x) store_bf16(to, x, LANES)
INLINE __m512bh NAME(broadcast)(const bf16 *from) {
    int32_t pair;
    memcpy(&pair, from, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
/* As assembly, because gcc 12 copies and spills accumulators of the intrinsic. */
INLINE vf NAME(multiply_add)(vf sum, FACTORS a, FACTORS b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
#define FACTOR float
#define PAIR 1
#define FACTORS vf
#define LOAD_FACTORS(from) load_f32(from, LANES)
#define BROADCAST(from) splat(*(from))
#define STORE_FACTORS(to, x) store_f32(to, x, LANES)
INLINE vf NAME(multiply_add)(vf sum, FACTORS a, FACTORS b) { return sum + a * b; }
#endif
#define EXPAND (WIDTH > PAIR) /* the cache's pairs become two floats */
#define INTO_L2 2 /* __builtin_prefetch: more loads are under way at once than into the first cache */

/* The rows of a tile: group j's row i starts at k[j] + i * k_stride (PAIR elements of the head dim for each of GROUP
   keys), or at v[j] + i * head_dim * PAIR (PAIR keys for each element of the head dim). The rows `ahead` are fetched
   into the cache meanwhile: those of the tile that comes next, or what is there already. */
typedef struct {
    const FACTOR *k[TILE_GROUPS], *v[TILE_GROUPS], *k_ahead[TILE_GROUPS], *v_ahead[TILE_GROUPS];
    int64_t k_stride, ahead_stride;
} NAME(tile);

/* Copies words (a pair of bf16, or one float) of which `used` (0..WIDTH) elements count into rows `stride` apart. */
INLINE void NAME(copy_words)(FACTOR *to, const ELEMENT *from, int64_t count, int64_t stride, int used) {
    const uint32_t mask = used == WIDTH ? 0xffffffff : used ? 0xffff : 0;
    (void)stride;
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = 0;
        if (mask) memcpy(&word, from + i * WIDTH, 4);
        word &= mask;
#if EXPAND
        uint32_t low = word << 16, high = word & 0xffff0000;
        memcpy(to + i, &low, 4);
        memcpy(to + stride + i, &high, 4);
#else
        memcpy(to + i * PAIR, &word, 4);
#endif
    }
}

INLINE void NAME(copy_v_row)(FACTOR *v_copy, const ELEMENT *from, int64_t key, int64_t dim, int64_t v_width, int used) {
    (void)v_width;
#if WIDTH == 2
    if (v_width == 1) { /* a page of one token keeps no pairs */
        for (int64_t d = 0; d < dim; d++)
#if EXPAND
            v_copy[key * dim + d] = used ? scalar_from_bf16(from[d]) : 0;
#else
            v_copy[key / 2 * dim * 2 + d * 2 + key % 2] = used ? from[d] : 0;
#endif
        return;
    }
#endif
    NAME(copy_words)(v_copy + key / PAIR * dim * PAIR, from, dim, dim, used);
}

/* Copies a group's keys (unless k_copy is NULL) and values; values past the request's length become zeros, whatever
   their slots hold, because 0 * NaN is NaN; scores of keys past it are not looked at. */
static void NAME(copy_group)(const attention_args *a, int64_t request, int64_t kv_head, int64_t first_key,
                             FACTOR *k_copy, FACTOR *v_copy) {
    int64_t page_size = a->page_size, dim = a->head_dim, left = a->kv_lens[request] - first_key;
    int64_t run = page_size < GROUP ? page_size : GROUP, v_width = page_size < WIDTH ? page_size : WIDTH;
    for (int64_t key = 0; key < GROUP; key += run) {
        int64_t slot = (first_key + key) % page_size, count = left - key < run ? left - key : run;
        const int32_t *pages = a->page_table + request * a->table_stride;
        int64_t page = count > 0 ? pages[(first_key + key) / page_size] : 0;
        int64_t offset = (page * a->num_kv_heads + kv_head) * page_size * dim;
        const ELEMENT *k = (const ELEMENT *)a->k_cache + offset, *v = (const ELEMENT *)a->v_cache + offset;
        for (int64_t d = 0; k_copy && d < dim && count > 0; d += WIDTH)
            NAME(copy_words)(k_copy + (d / PAIR * GROUP + key) * PAIR, k + (d / WIDTH * page_size + slot) * WIDTH,
                             count, GROUP, WIDTH);
        for (int64_t i = 0; i < run; i += v_width) {
            int64_t used = count - i < 0 ? 0 : count - i < v_width ? count - i : v_width;
            NAME(copy_v_row)(v_copy, v + (slot + i) * dim, key + i, dim, v_width, used == v_width ? WIDTH : used);
        }
    }
}

/* Where a group of keys lies in the cache, if its page holds all of it. */
INLINE int64_t NAME(group_offset)(const attention_args *a, int64_t request, int64_t kv_head, int64_t first_key) {
    int64_t page = a->page_table[request * a->table_stride + first_key / a->page_size];
    return (page * a->num_kv_heads + kv_head) * a->page_size * a->head_dim;
}

INLINE void NAME(fetch_nothing)(NAME(tile) *tile) {
    memcpy(tile->k_ahead, tile->k, sizeof tile->k);
    memcpy(tile->v_ahead, tile->v, sizeof tile->v);
    tile->ahead_stride = 0;
}

/* The tile at `first_key`. */
static void NAME(load_tile)(const attention_args *a, int64_t request, int64_t kv_head, int64_t first_key,
                            int64_t num_groups, FACTOR *k_copies, FACTOR *v_copies, NAME(tile) *tile) {
    int64_t page_size = a->page_size, dim = a->head_dim, kv_len = a->kv_lens[request];
    int is_in_place = !EXPAND && page_size >= GROUP;
    tile->k_stride = (is_in_place ? page_size : GROUP) * PAIR;
    for (int64_t j = 0; j < num_groups; j++, first_key += GROUP) {
        FACTOR *k_copy = k_copies + j * GROUP * dim, *v_copy = v_copies + j * GROUP * dim;
        int64_t slot = first_key % page_size, offset = 0;
        if (is_in_place) offset = NAME(group_offset)(a, request, kv_head, first_key);
        tile->k[j] = is_in_place ? (const FACTOR *)a->k_cache + offset + slot * PAIR : k_copy;
        tile->v[j] = is_in_place ? (const FACTOR *)a->v_cache + offset + slot * dim : v_copy;
        if (is_in_place && first_key + GROUP <= kv_len) continue;
        NAME(copy_group)(a, request, kv_head, first_key, is_in_place ? NULL : k_copy, v_copy);
        tile->v[j] = v_copy;
    }
    for (int64_t j = num_groups; j < TILE_GROUPS; j++)
        tile->k[j] = tile->k[0], tile->v[j] = tile->v[0];
    NAME(fetch_nothing)(tile);
}

/* Groups of another tile are fetched while this one is computed. */
static void NAME(fetch_ahead)(const attention_args *a, int64_t request, int64_t kv_head, int64_t first_key,
                              int64_t end_key, NAME(tile) *tile) {
    if (EXPAND || a->page_size < GROUP) return;
    tile->ahead_stride = a->page_size * PAIR;
    for (int64_t j = 0; j < TILE_GROUPS && first_key < end_key; j++, first_key += GROUP) {
        int64_t slot = first_key % a->page_size, offset = NAME(group_offset)(a, request, kv_head, first_key);
        tile->k_ahead[j] = (const FACTOR *)a->k_cache + offset + slot * PAIR;
        tile->v_ahead[j] = (const FACTOR *)a->v_cache + offset + slot * a->head_dim;
    }
}

/* scores[i][keys of `num_groups` groups from `first`] = q[i] . k, for `num_rows` <= ROWS rows. */
INLINE void NAME(score_block)(int num_rows, int num_groups, const FACTOR *q, const NAME(tile) *tile, int first,
                              int64_t dim, float *scores) {
    vf sums[ROWS][VECTORS] = {0};
    FACTORS keys[VECTORS];
    const FACTOR *k[PASS_GROUPS], *ahead[PASS_GROUPS];
    for (int j = 0; j < num_groups; j++) k[j] = tile->k[first + j], ahead[j] = tile->k_ahead[first + j];
    int64_t at = 0, at_ahead = 0;
    for (int64_t d = 0; d < dim; d += PAIR, at += tile->k_stride, at_ahead += tile->ahead_stride) {
#pragma GCC unroll 8
        for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
            keys[n] = LOAD_FACTORS(k[n / GROUP_VECTORS] + at + n % GROUP_VECTORS * LANES * PAIR);
#pragma GCC unroll 8
        for (int j = 0; j < num_groups; j++) __builtin_prefetch(ahead[j] + at_ahead, 0, INTO_L2);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; i++) {
            FACTORS query = BROADCAST(q + i * dim + d);
#pragma GCC unroll 8
            for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
                sums[i][n] = NAME(multiply_add)(sums[i][n], query, keys[n]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
            store_f32(scores + i * TILE + first * GROUP + n * LANES, sums[i][n], LANES);
}

/* out[i][columns] = out[i][columns] * rescale[i] + p[i] . v, for `num_rows` <= ROWS rows, some vectors of columns. */
INLINE void NAME(value_block)(int num_rows, int num_vectors, const FACTOR *p, const NAME(tile) *tile,
                              int64_t num_groups, int64_t dim, int64_t column, const float *rescale, float *out) {
    vf sums[ROWS][VECTORS];
    FACTORS values[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int n = 0; n < num_vectors; n++)
            sums[i][n] = load_f32(out + i * dim + column + n * LANES, LANES) * rescale[i];
    for (int64_t j = 0; j < num_groups; j++) {
        const FACTOR *v = tile->v[j] + column * PAIR, *ahead = tile->v_ahead[j] + column * PAIR;
        for (int key = 0; key < GROUP; key += PAIR, v += dim * PAIR, ahead += dim * PAIR) {
#pragma GCC unroll 8
            for (int n = 0; n < num_vectors; n++) {
                __builtin_prefetch(ahead + n * LANES * PAIR, 0, INTO_L2);
                values[n] = LOAD_FACTORS(v + n * LANES * PAIR);
            }
#pragma GCC unroll 8
            for (int i = 0; i < num_rows; i++) {
                FACTORS weight = BROADCAST(p + i * TILE + j * GROUP + key);
#pragma GCC unroll 8
                for (int n = 0; n < num_vectors; n++) sums[i][n] = NAME(multiply_add)(sums[i][n], weight, values[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int n = 0; n < num_vectors; n++) store_f32(out + i * dim + column + n * LANES, sums[i][n], LANES);
}

/* Both products of `num_rows` <= ROWS rows. Each number is a function of its own, with constants inside: gcc keeps the
   sums in registers only where a function has little else to keep. */
INLINE void NAME(score_groups)(int num_rows, int64_t num_groups, const FACTOR *q, const NAME(tile) *tile, int64_t dim,
                               float *scores) {
    int first = 0;
    for (; first + PASS_GROUPS <= num_groups; first += PASS_GROUPS)
        NAME(score_block)(num_rows, PASS_GROUPS, q, tile, first, dim, scores);
#if PASS_GROUPS > 1
    switch (num_groups - first) {
    case 3: NAME(score_block)(num_rows, 3, q, tile, first, dim, scores); break;
    case 2: NAME(score_block)(num_rows, 2, q, tile, first, dim, scores); break;
    case 1: NAME(score_block)(num_rows, 1, q, tile, first, dim, scores); break;
    }
#endif
}
INLINE void NAME(value_columns)(int num_rows, int64_t num_groups, const FACTOR *p, const NAME(tile) *tile, int64_t dim,
                                const float *rescale, float *out) {
    int64_t column = 0;
    for (; column + VECTORS * LANES <= dim; column += VECTORS * LANES)
        NAME(value_block)(num_rows, VECTORS, p, tile, num_groups, dim, column, rescale, out);
#if VECTORS * LANES > GROUP
    switch ((dim - column) / LANES) {
    case 3: NAME(value_block)(num_rows, 3, p, tile, num_groups, dim, column, rescale, out); break;
    case 2: NAME(value_block)(num_rows, 2, p, tile, num_groups, dim, column, rescale, out); break;
    case 1: NAME(value_block)(num_rows, 1, p, tile, num_groups, dim, column, rescale, out); break;
    }
#endif
}
#define PRODUCTS(n) \
    static __attribute__((noinline)) void NAME(score_##n)(int64_t num_groups, const FACTOR *q, const NAME(tile) *tile, \
                                                          int64_t dim, float *scores) { \
        NAME(score_groups)(n, num_groups, q, tile, dim, scores); \
    } \
    static __attribute__((noinline)) void NAME(value_##n)(int64_t num_groups, const FACTOR *p, const NAME(tile) *tile, \
                                                          int64_t dim, const float *rescale, float *out) { \
        NAME(value_columns)(n, num_groups, p, tile, dim, rescale, out); \
    }
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(3)
#if ROWS == 6
PRODUCTS(4)
PRODUCTS(5)
PRODUCTS(6)
#endif
