/* Paged attention for one element type. A flash-style loop: for a block of query rows, take the
   keys in tiles, keep the running maximum and sum of each row (Milakov and Gimelshein, 2018; Dao et al., 2022).

Where the CPU multiplies pairs of bf16 (MULTIPLY_PAIRS) the products run on bf16 factors and fp32 sums, else on floats.
The cache keeps rows of pairs, so a full group of keys is read in place; other groups are copied into that form. */
#include "cpu_attention_plan.h"

#if MULTIPLY_PAIRS
#define FACTOR bf16
#define PAIR 2
#define FACTORS __m512bh
#define LOAD_FACTORS(from) ((__m512bh)_mm512_loadu_si512(from))
#define BROADCAST(from) NAME(broadcast)(from)
#define MULTIPLY_ADD(sum, a, b) ((vf)_mm512_dpbf16_ps((__m512)(sum), a, b))
#define STORE_FACTORS(to, x) store_bf16(to, x, LANES)
INLINE __m512bh NAME(broadcast)(const bf16 *from) {
    int32_t pair;
    memcpy(&pair, from, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
#else
#define FACTOR float
#define PAIR 1
#define FACTORS vf
#define LOAD_FACTORS(from) load_f32(from, LANES)
#define BROADCAST(from) splat(*(from))
#define MULTIPLY_ADD(sum, a, b) ((sum) + (a) * (b))
#define STORE_FACTORS(to, x) store_f32(to, x, LANES)
#endif
#define EXPAND (WIDTH > PAIR) /* the cache's pairs become two floats */

/* The rows of a tile: group j's row i starts at k[j] + i * k_stride[j] (PAIR elements of the head dim for each of GROUP
   keys), or at v[j] + i * head_dim * PAIR (PAIR keys for each element of the head dim). */
typedef struct {
    const FACTOR *k[TILE_GROUPS], *v[TILE_GROUPS];
    int64_t k_stride[TILE_GROUPS];
} NAME(tile);

typedef struct {
    FACTOR *q, *p, *k_copy, *v_copy;
    float *out, *scores, *maximum, *sum, *rescale;
} NAME(scratch);

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

/* Copies a group's keys and values; those past the request's length become zeros, whatever their slots hold. */
static void NAME(copy_group)(const attention_args *a, const work_item *item, int64_t first_key, FACTOR *k_copy,
                             FACTOR *v_copy) {
    int64_t page_size = a->page_size, dim = a->head_dim, left = a->kv_lens[item->request] - first_key;
    int64_t run = page_size < GROUP ? page_size : GROUP, v_width = page_size < WIDTH ? page_size : WIDTH;
    for (int64_t key = 0; key < GROUP; key += run) {
        int64_t slot = (first_key + key) % page_size, count = left - key < run ? left - key : run;
        const int32_t *pages = a->page_table + item->request * a->max_pages;
        int64_t page = count > 0 ? pages[(first_key + key) / page_size] : 0;
        int64_t offset = (page * a->num_kv_heads + item->kv_head) * page_size * dim;
        const ELEMENT *k = (const ELEMENT *)a->k_cache + offset, *v = (const ELEMENT *)a->v_cache + offset;
        for (int64_t d = 0; d < dim && count > 0; d += WIDTH)
            NAME(copy_words)(k_copy + (d / PAIR * GROUP + key) * PAIR, k + (d / WIDTH * page_size + slot) * WIDTH,
                             count, GROUP, WIDTH);
        for (int64_t i = 0; i < run; i += v_width) {
            int64_t used = count - i < 0 ? 0 : count - i < v_width ? count - i : v_width;
            NAME(copy_v_row)(v_copy, v + (slot + i) * dim, key + i, dim, v_width, used == v_width ? WIDTH : used);
        }
    }
}

static void NAME(load_tile)(const attention_args *a, const work_item *item, int64_t first_key, int64_t num_groups,
                            NAME(scratch) *s, NAME(tile) *tile) {
    int64_t page_size = a->page_size, dim = a->head_dim, kv_len = a->kv_lens[item->request];
    const int32_t *pages = a->page_table + item->request * a->max_pages;
    for (int64_t j = 0; j < num_groups; j++, first_key += GROUP) {
        if (EXPAND || page_size < GROUP || first_key + GROUP > kv_len) {
            FACTOR *k_copy = s->k_copy + j * GROUP * dim, *v_copy = s->v_copy + j * GROUP * dim;
            NAME(copy_group)(a, item, first_key, k_copy, v_copy);
            tile->k[j] = k_copy, tile->v[j] = v_copy, tile->k_stride[j] = GROUP * PAIR;
            continue;
        }
        int64_t page = pages[first_key / page_size], slot = first_key % page_size;
        int64_t offset = (page * a->num_kv_heads + item->kv_head) * page_size * dim;
        tile->k[j] = (const FACTOR *)a->k_cache + offset + slot * PAIR;
        tile->v[j] = (const FACTOR *)a->v_cache + offset + slot * dim;
        tile->k_stride[j] = page_size * PAIR;
    }
}

/* scores[i][keys of `num_groups` groups from `first`] = q[i] . k, for `num_rows` <= ROWS rows. */
INLINE void NAME(score_block)(int num_rows, int num_groups, const FACTOR *q, const NAME(tile) *tile, int first,
                              int64_t dim, float *scores) {
    vf sums[ROWS][VECTORS] = {0};
    FACTORS keys[VECTORS];
    const FACTOR *k[PASS_GROUPS];
    for (int j = 0; j < num_groups; j++) k[j] = tile->k[first + j];
    for (int64_t d = 0; d < dim; d += PAIR) {
#pragma GCC unroll 8
        for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
            keys[n] = LOAD_FACTORS(k[n / GROUP_VECTORS] + n % GROUP_VECTORS * LANES * PAIR);
#pragma GCC unroll 8
        for (int i = 0; i < num_rows; i++) {
            FACTORS query = BROADCAST(q + i * dim + d);
#pragma GCC unroll 8
            for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
                sums[i][n] = MULTIPLY_ADD(sums[i][n], query, keys[n]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < num_groups; j++) k[j] += tile->k_stride[first + j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int n = 0; n < num_groups * GROUP_VECTORS; n++)
            store_f32(scores + i * TILE + first * GROUP + n * LANES, sums[i][n], LANES);
}

/* out[i][columns] = out[i][columns] * rescale[i] + p[i] . v, for `num_rows` <= ROWS rows and some vectors of columns. */
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
        const FACTOR *v = tile->v[j] + column * PAIR;
        for (int key = 0; key < GROUP; key += PAIR, v += dim * PAIR) {
#pragma GCC unroll 8
            for (int n = 0; n < num_vectors; n++) values[n] = LOAD_FACTORS(v + n * LANES * PAIR);
#pragma GCC unroll 8
            for (int i = 0; i < num_rows; i++) {
                FACTORS weight = BROADCAST(p + i * TILE + j * GROUP + key);
#pragma GCC unroll 8
                for (int n = 0; n < num_vectors; n++) sums[i][n] = MULTIPLY_ADD(sums[i][n], weight, values[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++)
#pragma GCC unroll 8
        for (int n = 0; n < num_vectors; n++) store_f32(out + i * dim + column + n * LANES, sums[i][n], LANES);
}

/* Both products for a constant number of rows; the numbers of groups and vectors become constants here. */
INLINE void NAME(score_rows)(int num_rows, int64_t num_groups, const FACTOR *q, const NAME(tile) *tile, int64_t dim,
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
INLINE void NAME(value_rows)(int num_rows, const FACTOR *p, const NAME(tile) *tile, int64_t num_groups, int64_t dim,
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
/* One row's step of the online softmax over a tile, of which it sees the keys [low, high). */
INLINE void NAME(softmax_row)(const attention_args *a, float *scores, FACTOR *p, int64_t width, int64_t low,
                              int64_t high, float *maximum, float *sum, float *rescale) {
    *rescale = 1.0f;
    if (low >= high) {
        memset(p, 0, width * sizeof(FACTOR));
        return;
    }
    const vi lanes = lane_numbers();
    const int is_cut = low > 0 || high < width;
    vf top = splat(-INFINITY), total = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vf x = load_f32(scores + i, LANES) * a->scale;
        if (a->soft_cap != 0) x = a->soft_cap * vtanh(x / a->soft_cap);
        if (is_cut) x = choose((lanes >= (int32_t)(low - i)) & (lanes < (int32_t)(high - i)), x, splat(-INFINITY));
        top = vmax(x, top);
        store_f32(scores + i, x, LANES);
    }
    float highest = max_lanes(top);
    if (highest > *maximum) {
        *rescale = expf(*maximum - highest);
        *maximum = highest;
    }
    for (int64_t i = 0; i < width; i += LANES) {
        vf x = load_f32(scores + i, LANES), weight = vexp(x - *maximum);
        if (is_cut) weight = choose(x == -INFINITY, splat(0), weight);
        total += weight;
        STORE_FACTORS(p + i, weight);
    }
    *sum = *sum * *rescale + sum_lanes(total);
}

static void NAME(attend_tile)(const attention_args *a, const work_item *item, int64_t first_key, NAME(scratch) *s) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, num_rows = item->num_queries * group;
    int64_t left = item->end_key - first_key, num_groups = left >= TILE ? TILE_GROUPS : (left + GROUP - 1) / GROUP;
    NAME(tile) tile;
    NAME(load_tile)(a, item, first_key, num_groups, s, &tile);
#define SCORE(n) NAME(score_rows)(n, num_groups, s->q + row * dim, &tile, dim, s->scores + row * TILE)
    for (int64_t row = 0; row < num_rows; row += ROWS) FOR_ROWS(num_rows - row, SCORE)
    int64_t start = a->query_starts[item->request], end = a->query_starts[item->request + 1];
    int64_t position = a->kv_lens[item->request] - (end - start) + item->first_query;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t own = position + row / group, low = first_visible(a, own);
        low = (low > item->first_key ? low : item->first_key) - first_key;
        int64_t high = (own < item->end_key ? own + 1 : item->end_key) - first_key, width = num_groups * GROUP;
        NAME(softmax_row)(a, s->scores + row * TILE, s->p + row * TILE, width, low > 0 ? low : 0,
                          high < width ? high : width, s->maximum + row, s->sum + row, s->rescale + row);
    }
#define VALUE(n) NAME(value_rows)(n, s->p + row * TILE, &tile, num_groups, dim, s->rescale + row, s->out + row * dim)
    for (int64_t row = 0; row < num_rows; row += ROWS) FOR_ROWS(num_rows - row, VALUE)
}

/* Rows of an item: head `row % group` of query `row / group`. */
INLINE int64_t NAME(row_offset)(const attention_args *a, const work_item *item, int64_t row, int64_t stride) {
    int64_t group = a->num_heads / a->num_kv_heads;
    int64_t query = a->query_starts[item->request] + item->first_query + row / group;
    return query * stride + (item->kv_head * group + row % group) * a->head_dim;
}

INLINE void NAME(write_row)(const attention_args *a, ELEMENT *to, const float *from, float sum) {
    for (int64_t d = 0; d < a->head_dim; d += LANES) STORE(to + d, load_f32(from + d, LANES) / sum, LANES);
}

static NAME(scratch) NAME(make_scratch)(const attention_args *a, int64_t num_rows) {
    int64_t floats = num_rows * (2 * a->head_dim + 2 * TILE + 3) + 2 * TILE * a->head_dim + 64;
    float *memory = thread_scratch(floats * sizeof(float));
    NAME(scratch) s;
    s.out = memory;
    s.scores = s.out + num_rows * a->head_dim;
    s.q = (FACTOR *)(s.scores + num_rows * TILE);
    s.p = (FACTOR *)((float *)s.q + num_rows * a->head_dim);
    s.k_copy = (FACTOR *)((float *)s.p + num_rows * TILE);
    s.v_copy = (FACTOR *)((float *)s.k_copy + TILE * a->head_dim);
    s.maximum = (float *)s.v_copy + TILE * a->head_dim;
    s.sum = s.maximum + num_rows;
    s.rescale = s.sum + num_rows;
    return s;
}

static void NAME(run_item)(const attention_args *a, const work_item *item, float *partials) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, num_rows = item->num_queries * group;
    NAME(scratch) s = NAME(make_scratch)(a, num_rows);
    memset(s.out, 0, num_rows * dim * sizeof(float));
    for (int64_t row = 0; row < num_rows; row++) {
        const ELEMENT *q = (const ELEMENT *)a->q + NAME(row_offset)(a, item, row, a->q_stride);
#if EXPAND
        for (int64_t d = 0; d < dim; d += LANES) store_f32(s.q + row * dim + d, LOAD(q + d, LANES), LANES);
#else
        memcpy(s.q + row * dim, q, dim * sizeof(ELEMENT));
#endif
        s.maximum[row] = -INFINITY, s.sum[row] = 0;
    }
    for (int64_t key = item->first_key / TILE * TILE; key < item->end_key; key += TILE)
        NAME(attend_tile)(a, item, key, &s);
    for (int64_t row = 0; row < num_rows; row++) {
        if (item->partial < 0) {
            ELEMENT *out = (ELEMENT *)a->out + NAME(row_offset)(a, item, row, a->num_heads * dim);
            NAME(write_row)(a, out, s.out + row * dim, s.sum[row]);
            continue;
        }
        float *partial = partials + (item->partial * group + row) * (dim + 2);
        memcpy(partial, s.out + row * dim, dim * sizeof(float));
        partial[dim] = s.maximum[row], partial[dim + 1] = s.sum[row];
    }
}

/* Joins the `count` partial results of one query and KV head, which lie behind each other from `item` on. */
static void NAME(join_partials)(const attention_args *a, const work_item *item, int64_t count, float *partials) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, step = group * (dim + 2);
    for (int64_t row = 0; row < group; row++) {
        float *first = partials + (item->partial * group + row) * (dim + 2), highest = -INFINITY, sum = 0;
        for (int64_t i = 0; i < count; i++) highest = fmaxf(highest, first[i * step + dim]);
        for (int64_t i = 0; i < count; i++) {
            float *part = first + i * step, factor = expf(part[dim] - highest);
            sum += part[dim + 1] * factor;
            for (int64_t d = 0; d < dim; d++) first[d] = part[d] * factor + (i ? first[d] : 0);
        }
        ELEMENT *out = (ELEMENT *)a->out + NAME(row_offset)(a, item, row, a->num_heads * dim);
        NAME(write_row)(a, out, first, sum);
    }
}

/* 0, or -1 where memory is short. */
int NAME(paged_attention)(const attention_args *a) {
    int64_t num_partials = 0, num_items = plan_work(a, NULL, &num_partials);
    int64_t group = a->num_heads / a->num_kv_heads;
    work_item *items = malloc((num_items + 1) * sizeof *items);
    float *partials = malloc((num_partials * group * (a->head_dim + 2) + 1) * sizeof *partials);
    if (!items || !partials) {
        free(items), free(partials);
        return -1;
    }
    num_partials = 0;
    plan_work(a, items, &num_partials);
#pragma omp parallel for schedule(dynamic, 1) num_threads(a->num_threads) if (num_items > 1)
    for (int64_t i = 0; i < num_items; i++) NAME(run_item)(a, items + i, partials);
    for (int64_t i = 0; i < num_items; i++) {
        if (items[i].partial < 0) continue;
        int64_t count = 1;
        while (i + count < num_items && items[i + count].partial >= 0 && items[i + count].request == items[i].request &&
               items[i + count].kv_head == items[i].kv_head)
            count++;
        NAME(join_partials)(a, items + i, count, partials);
        i += count - 1;
    }
    free(items), free(partials);
    return 0;
}
