/* Paged attention for one element type. A flash-style loop: for a block of query rows, take the keys in tiles, keep the
   running maximum and sum of each row (Milakov and Gimelshein, 2018; Dao et al., 2022). A few rows at a time go through
   scores, softmax and values, so that all of it stays in the first cache beside the tile. */
#include "cpu_attention_tile.h"

#define LOWEST -1e30f /* a maximum of nothing; finite, so that differences are */
#define HEADROOM 8.0f /* weights may come to 2^HEADROOM, and maxima be too low by it */

/* Of the rows of an item, but scores and p, which the rows in work take in turn. Maxima are of scores * log2(e). */
typedef struct {
    FACTOR *q, *p, *k_copies, *v_copies;
    float *out, *scores, *maximum, *sums, *rescale; /* sums: [rows, LANES] */
    int64_t *positions;
} NAME(scratch);

/* The keys [low, high) of a tile that a row sees. */
typedef struct {
    int64_t low, high;
} NAME(span);

INLINE vi NAME(lanes_within)(int64_t low, int64_t high) {
    const vi lanes = lane_numbers();
    return (lanes >= (int32_t)low) & (lanes < (int32_t)high);
}

INLINE int NAME(is_cut)(const NAME(span) *span, int64_t key) { return span->low > key || span->high < key + LANES; }

/* Scores become soft_cap * tanh(score * scale / soft_cap). */
INLINE void NAME(cap_scores)(int num_rows, const attention_args *a, float *scores) {
    for (int64_t i = 0; i < num_rows * TILE; i += LANES)
        store_f32(scores + i, a->soft_cap * vtanh(load_f32(scores + i, LANES) * (a->scale / a->soft_cap)), LANES);
}

/* Raises the maxima of the rows to those of `tops`, if one would else be passed by HEADROOM; `rescale` is what the sums
   so far are to be multiplied with. Mostly nothing changes, which is far cheaper to find out than the maxima. */
INLINE void NAME(raise_maxima)(int num_rows, const vf *tops, float *maximum, float *rescale) {
    vf above = splat(LOWEST);
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++) {
        above = vmax(tops[i] - maximum[i], above);
        rescale[i] = 1;
    }
    if (!is_any_above(above, HEADROOM)) return;
    float highest[ROWS];
    for (int i = 0; i < num_rows; i++) highest[i] = max_lanes(tops[i]);
    for (int i = 0; i < num_rows; i += LANES) {
        vf old = load_f32(maximum + i, num_rows - i), now = vmax(load_f32(highest + i, num_rows - i), old);
        store_f32(maximum + i, now, num_rows - i);
        store_f32(rescale + i, vexp2(old - now, 0), num_rows - i);
    }
}

/* The step of the online softmax over a tile for some rows, which see all of it where `spans` is NULL; sums are kept by
   lane. */
INLINE void NAME(softmax_rows)(int num_rows, const attention_args *a, const NAME(span) *spans, int64_t width,
                               float *scores, FACTOR *p, float *maximum, float *sums, float *rescale) {
    const float factor = (a->soft_cap != 0 ? 1.0f : a->scale) * LOG2E;
    vf tops[ROWS];
    if (a->soft_cap != 0) NAME(cap_scores)(num_rows, a, scores);
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++) {
        tops[i] = splat(LOWEST);
        for (int64_t j = 0; j < width; j += LANES) {
            vf x = load_f32(scores + i * TILE + j, LANES) * factor;
            if (spans && NAME(is_cut)(spans + i, j))
                x = choose(NAME(lanes_within)(spans[i].low - j, spans[i].high - j), x, splat(LOWEST));
            tops[i] = vmax(x, tops[i]);
        }
    }
    NAME(raise_maxima)(num_rows, tops, maximum, rescale);
    for (int i = 0; i < num_rows; i++) {
        vf total = load_f32(sums + i * LANES, LANES) * rescale[i];
        for (int64_t j = 0; j < width; j += LANES) {
            vf weight = vexp2(load_f32(scores + i * TILE + j, LANES) * factor - maximum[i], WIDTH == 2);
            if (spans && NAME(is_cut)(spans + i, j))
                weight = choose(NAME(lanes_within)(spans[i].low - j, spans[i].high - j), weight, splat(0));
            total += weight;
            STORE_FACTORS(p + i * TILE + j, weight);
        }
        store_f32(sums + i * LANES, total, LANES);
    }
}

/* `num_rows` <= ROWS rows from `row` on, over the groups of the tile at `first_key` that any of them sees. */
static void NAME(attend_rows)(int num_rows, const attention_args *a, const work_item *item, int64_t row,
                              int64_t first_key, const NAME(tile) *tile, const NAME(scratch) *s) {
    int64_t dim = a->head_dim, end = 0;
    NAME(span) spans[ROWS];
    for (int i = 0; i < num_rows; i++) {
        int64_t own = s->positions[row + i], low = first_visible(a, own);
        spans[i].low = (low > item->first_key ? low : item->first_key) - first_key;
        end = (own < item->end_key ? own + 1 : item->end_key) - first_key;
        spans[i].high = end = end < TILE ? end : TILE;
    }
    if (end <= 0 || spans[0].low >= end) return;
    int64_t num_groups = (end + GROUP - 1) / GROUP;
#define SCORE(n) NAME(score_##n)(num_groups, s->q + row * dim, tile, dim, s->scores)
#define SOFTMAX(spans, width) \
    NAME(softmax_rows)(num_rows, a, spans, width, s->scores, s->p, s->maximum + row, s->sums + row * LANES, s->rescale)
#define VALUE(n) NAME(value_##n)(num_groups, s->p, tile, dim, s->rescale, s->out + row * dim)
    FOR_ROWS(num_rows, SCORE)
    if (spans[0].high == TILE && spans[num_rows - 1].low <= 0) SOFTMAX(NULL, TILE);
    else SOFTMAX(spans, num_groups * GROUP);
    FOR_ROWS(num_rows, VALUE)
}

/* The first of an item's queries, counted over all requests. */
INLINE int64_t NAME(first_query)(const attention_args *a, const work_item *item) {
    return (a->query_starts ? a->query_starts[item->request] : item->request) + item->first_query;
}

/* A sum of 0 is that of no keys. */
INLINE void NAME(write_row)(const attention_args *a, ELEMENT *to, const float *from, float sum) {
    float factor = sum == 0 ? 0 : 1 / sum;
    for (int64_t d = 0; d < a->head_dim; d += LANES) STORE(to + d, load_f32(from + d, LANES) * factor, LANES);
}

/* For the longest item; `out` is NULL where memory is short. */
static NAME(scratch) NAME(make_scratch)(const attention_args *a) {
    int64_t num_rows = a->query_starts ? a->num_heads / a->num_kv_heads * queries_per_block(a) : a->num_heads;
    int64_t floats = num_rows * (2 * a->head_dim + 3 + LANES) + ROWS * (2 * TILE + 1) + 2 * TILE * a->head_dim + 64;
    floats += floats % 2;
    float *memory = thread_scratch(floats * sizeof(float));
    NAME(scratch) s = {0};
    if (!memory) return s;
    s.out = memory;
    s.scores = s.out + num_rows * a->head_dim;
    s.q = (FACTOR *)(s.scores + ROWS * TILE);
    s.p = (FACTOR *)((float *)s.q + num_rows * a->head_dim);
    s.k_copies = (FACTOR *)((float *)s.p + ROWS * TILE);
    s.v_copies = (FACTOR *)((float *)s.k_copies + TILE * a->head_dim);
    s.sums = (float *)s.v_copies + TILE * a->head_dim;
    s.maximum = s.sums + num_rows * LANES;
    s.rescale = s.maximum + num_rows;
    s.positions = (int64_t *)(memory + floats) - num_rows;
    return s;
}

/* Where split 0 of a head of a query (numbered over all requests) is; the next split's is heads * (dim + 2) behind. */
INLINE float *NAME(partial)(const attention_args *a, int64_t query, int64_t head) {
    return a->partials + (query * a->max_splits * a->num_heads + head) * (a->head_dim + 2);
}

INLINE void NAME(copy_query)(FACTOR *to, const ELEMENT *from, int64_t dim) {
#if EXPAND
    for (int64_t d = 0; d < dim; d += LANES) store_f32(to + d, LOAD(from + d, LANES), LANES);
#else
    for (int64_t d = 0; d < dim; d += GROUP) memcpy(to + d, from + d, GROUP * sizeof(ELEMENT));
#endif
}

/* Rows of an item: by KV head, by query, by the heads of the group. */
static void NAME(start_rows)(const attention_args *a, const work_item *item, const NAME(scratch) *s) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, first = NAME(first_query)(a, item), row = 0;
    request_plan plan = plan_request(a, item->request);
    memset(s->out, 0, item->num_kv_heads * item->num_queries * group * dim * sizeof(float));
    for (int64_t kv_head = item->kv_head; kv_head < item->kv_head + item->num_kv_heads; kv_head++)
        for (int64_t query = 0; query < item->num_queries; query++) {
            const ELEMENT *q = (const ELEMENT *)a->q + (first + query) * a->q_stride + kv_head * group * dim;
            for (int64_t head = 0; head < group; head++, row++) {
                NAME(copy_query)(s->q + row * dim, q + head * dim, dim);
                s->positions[row] = plan.kv_len - plan.num_queries + item->first_query + query;
                s->maximum[row] = LOWEST;
                store_f32(s->sums + row * LANES, (vf){0}, LANES);
            }
        }
}

static void NAME(finish_row)(const attention_args *a, const work_item *item, int64_t query, int64_t head, int64_t row,
                             const NAME(scratch) *s) {
    int64_t dim = a->head_dim;
    float sum = sum_lanes(load_f32(s->sums + row * LANES, LANES));
    if (item->split < 0) {
        NAME(write_row)(a, (ELEMENT *)a->out + (query * a->num_heads + head) * dim, s->out + row * dim, sum);
    } else {
        float *part = NAME(partial)(a, query, head) + item->split * a->num_heads * (dim + 2);
        memcpy(part, s->out + row * dim, dim * sizeof(float));
        part[dim] = s->maximum[row], part[dim + 1] = sum;
    }
}

static void NAME(finish_rows)(const attention_args *a, const work_item *item, const NAME(scratch) *s) {
    int64_t group = a->num_heads / a->num_kv_heads, first = NAME(first_query)(a, item), row = 0;
    for (int64_t kv_head = item->kv_head; kv_head < item->kv_head + item->num_kv_heads; kv_head++)
        for (int64_t query = first; query < first + item->num_queries; query++)
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                NAME(finish_row)(a, item, query, head, row++, s);
}

/* The rows of KV head number `nth` of an item over the tile at `key`; `ahead` is the item that comes next, or NULL. */
static void NAME(attend_tile)(const attention_args *a, const work_item *item, const work_item *ahead, int64_t nth,
                              int64_t key, const NAME(scratch) *s) {
    int64_t left = item->end_key - key, num_groups = left >= TILE ? TILE_GROUPS : (left + GROUP - 1) / GROUP;
    int64_t kv_head = item->kv_head + nth, num_rows = item->num_queries * (a->num_heads / a->num_kv_heads);
    NAME(tile) tile;
    NAME(load_tile)(a, item->request, kv_head, key, num_groups, s->k_copies, s->v_copies, &tile);
    if (nth + 1 < item->num_kv_heads)
        NAME(fetch_ahead)(a, item->request, kv_head + 1, key, item->end_key, &tile);
    else if (left > TILE)
        NAME(fetch_ahead)(a, item->request, item->kv_head, key + TILE, item->end_key, &tile);
    else if (ahead)
        NAME(fetch_ahead)(a, ahead->request, ahead->kv_head, ahead->first_key / TILE * TILE, ahead->end_key, &tile);
    for (int64_t row = 0; row < num_rows; row += ROWS) {
        int count = (int)(num_rows - row < ROWS ? num_rows - row : ROWS);
        NAME(attend_rows)(count, a, item, nth * num_rows + row, key, &tile, s);
        if (row == 0) NAME(fetch_nothing)(&tile);
    }
}

static void NAME(run_item)(const attention_args *a, const work_item *item, const work_item *ahead,
                           const NAME(scratch) *s) {
    NAME(start_rows)(a, item, s);
    for (int64_t key = item->first_key / TILE * TILE; key < item->end_key; key += TILE)
        for (int64_t nth = 0; nth < item->num_kv_heads; nth++) NAME(attend_tile)(a, item, ahead, nth, key, s);
    NAME(finish_rows)(a, item, s);
}

/* Joins the splits of one head of a query. */
static void NAME(join_splits)(const attention_args *a, int64_t query, int64_t head, int64_t num_splits) {
    int64_t dim = a->head_dim, step = a->num_heads * (dim + 2);
    float *first = NAME(partial)(a, query, head), highest = LOWEST, sum = 0;
    for (int64_t i = 0; i < num_splits; i++) highest = fmaxf(highest, first[i * step + dim]);
    for (int64_t i = 0; i < num_splits; i++) {
        float *part = first + i * step, factor = exp2f(part[dim] - highest);
        sum += part[dim + 1] * factor;
        for (int64_t d = 0; d < dim; d += LANES) {
            vf before = i ? load_f32(first + d, LANES) : (vf){0};
            store_f32(first + d, load_f32(part + d, LANES) * factor + before, LANES);
        }
    }
    NAME(write_row)(a, (ELEMENT *)a->out + (query * a->num_heads + head) * dim, first, sum);
}

/* 0, or -1 where memory is short. */
int NAME(paged_attention)(const attention_args *a, team *t) {
    NAME(scratch) s = NAME(make_scratch)(a);
    work_cursor cursor = {0};
    int64_t heads_each = heads_per_item(a, t->num_threads), count = count_items(a, heads_each);
    int64_t number = s.out ? next_near_item(t, count) : -1;
    work_item item, ahead;
    if (number >= 0) ahead = find_item(a, heads_each, number, &cursor);
    while (number >= 0) {
        item = ahead;
        number = next_near_item(t, count);
        if (number >= 0) ahead = find_item(a, heads_each, number, &cursor);
        NAME(run_item)(a, &item, number >= 0 ? &ahead : NULL, &s);
    }
    if (a->max_splits > 1) team_barrier(t); /* the same on every thread */
    for (int64_t request = 0; request < a->num_requests && a->max_splits > 1; request++) {
        request_plan plan = plan_request(a, request);
        int64_t count = plan.num_splits > 1 ? plan.num_queries * a->num_heads : 0;
        for (int64_t i = part_start(t, count); i < part_end(t, count); i++)
            NAME(join_splits)(a, plan.first_query + i / a->num_heads, i % a->num_heads, plan.num_splits);
    }
    return s.out ? 0 : 1;
}
