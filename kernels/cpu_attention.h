/* Paged attention for one element type. A flash-style loop: for a block of query rows, take the keys in tiles, keep the
   running maximum and sum of each row (Milakov and Gimelshein, 2018; Dao et al., 2022). A few rows at a time go through
   scores, softmax and values, so that all of it stays in the first cache beside the tile. */
#include "cpu_attention_tile.h"

#define LOG2E 1.44269504f
#define LOWEST -1e30f /* a maximum of nothing; finite, so that differences are */
#define HEADROOM 8.0f /* weights may come to 2^HEADROOM, and maxima be too low by it */

/* Of the rows of an item, but scores and p, which the rows in work take in turn. Maxima are of scores * log2(e). */
typedef struct {
    FACTOR *q, *p, *k_copies, *v_copies;
    float *out, *scores, *maximum, *sums, *rescale; /* sums: [rows, LANES] */
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

/* Raises the maxima of the rows to those of `tops`, if one would else be passed by HEADROOM; and what the sums so far are
   to be multiplied with. Mostly nothing changes, which is far cheaper to find out than the maxima. */
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

/* The step of the online softmax over a tile for some rows; sums are kept by lane. */
INLINE void NAME(softmax_rows)(int num_rows, const attention_args *a, const NAME(span) *spans, int64_t width, float *scores,
                               FACTOR *p, float *maximum, float *sums, float *rescale) {
    const float factor = (a->soft_cap != 0 ? 1.0f : a->scale) * LOG2E;
    vf tops[ROWS];
    if (a->soft_cap != 0) NAME(cap_scores)(num_rows, a, scores);
#pragma GCC unroll 8
    for (int i = 0; i < num_rows; i++) {
        tops[i] = splat(LOWEST);
        for (int64_t j = 0; j < width; j += LANES) {
            vf x = load_f32(scores + i * TILE + j, LANES) * factor;
            if (NAME(is_cut)(spans + i, j))
                x = choose(NAME(lanes_within)(spans[i].low - j, spans[i].high - j), x, splat(LOWEST));
            tops[i] = vmax(x, tops[i]);
        }
    }
    NAME(raise_maxima)(num_rows, tops, maximum, rescale);
    for (int i = 0; i < num_rows; i++) {
        vf total = load_f32(sums + i * LANES, LANES) * rescale[i];
        for (int64_t j = 0; j < width; j += LANES) {
            vf weight = vexp2(load_f32(scores + i * TILE + j, LANES) * factor - maximum[i], WIDTH == 2);
            if (NAME(is_cut)(spans + i, j))
                weight = choose(NAME(lanes_within)(spans[i].low - j, spans[i].high - j), weight, splat(0));
            total += weight;
            STORE_FACTORS(p + i * TILE + j, weight);
        }
        store_f32(sums + i * LANES, total, LANES);
    }
}

/* `num_rows` <= ROWS rows from `row` on, over the groups of the tile at `first_key` that any of them sees. */
INLINE void NAME(attend_rows)(int num_rows, const attention_args *a, const work_item *item, int64_t position,
                              int64_t row, int64_t first_key, const NAME(tile) *tile, const NAME(scratch) *s) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, end = 0;
    NAME(span) spans[ROWS];
    for (int i = 0; i < num_rows; i++) {
        int64_t own = position + (row + i) / group, low = first_visible(a, own);
        low = (low > item->first_key ? low : item->first_key) - first_key;
        end = (own < item->end_key ? own + 1 : item->end_key) - first_key;
        spans[i].low = low > 0 ? low : 0, spans[i].high = end = end < TILE ? end : TILE;
    }
    int64_t num_groups = (end + GROUP - 1) / GROUP;
    if (spans[0].low >= end) return;
    NAME(score_rows)(num_rows, num_groups, s->q + row * dim, tile, dim, s->scores);
    NAME(softmax_rows)(num_rows, a, spans, num_groups * GROUP, s->scores, s->p, s->maximum + row,
                       s->sums + row * LANES, s->rescale);
    NAME(value_rows)(num_rows, s->p, tile, num_groups, dim, s->rescale, s->out + row * dim);
}

/* Rows of an item: head `row % group` of query `row / group`. */
INLINE int64_t NAME(row_offset)(const attention_args *a, const work_item *item, int64_t row, int64_t stride) {
    int64_t group = a->num_heads / a->num_kv_heads, first = a->query_starts ? a->query_starts[item->request] : item->request;
    return (first + item->first_query + row / group) * stride + (item->kv_head * group + row % group) * a->head_dim;
}

/* A sum of 0 is that of no keys. */
INLINE void NAME(write_row)(const attention_args *a, ELEMENT *to, const float *from, float sum) {
    float factor = sum == 0 ? 0 : 1 / sum;
    for (int64_t d = 0; d < a->head_dim; d += LANES) STORE(to + d, load_f32(from + d, LANES) * factor, LANES);
}

/* For the longest item; `out` is NULL where memory is short. */
static NAME(scratch) NAME(make_scratch)(const attention_args *a) {
    int64_t num_rows = a->num_heads / a->num_kv_heads * (a->query_starts ? queries_per_block(a) : 1);
    int64_t floats = num_rows * (2 * a->head_dim + 1 + LANES) + ROWS * (2 * TILE + 1) + 2 * TILE * a->head_dim + 64;
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
    return s;
}

/* Where split 0 of a head of a query (numbered over all requests) is; the next split's is heads * (dim + 2) behind. */
INLINE float *NAME(partial)(const attention_args *a, int64_t query, int64_t head) {
    return a->partials + (query * a->max_splits * a->num_heads + head) * (a->head_dim + 2);
}

/* `ahead`: the item that comes next, or NULL. */
static void NAME(attend_keys)(const attention_args *a, const work_item *item, const work_item *ahead, int64_t num_rows,
                              const NAME(scratch) *s) {
    request_plan plan = plan_request(a, item->request);
    int64_t position = plan.kv_len - plan.num_queries + item->first_query;
    for (int64_t key = item->first_key / TILE * TILE; key < item->end_key; key += TILE) {
        int64_t left = item->end_key - key, num_groups = left >= TILE ? TILE_GROUPS : (left + GROUP - 1) / GROUP;
        NAME(tile) tile;
        NAME(load_tile)(a, item, key, num_groups, s->k_copies, s->v_copies, &tile);
        if (key + TILE < item->end_key) NAME(fetch_ahead)(a, item, key + TILE, &tile);
        else if (ahead) NAME(fetch_ahead)(a, ahead, ahead->first_key / TILE * TILE, &tile);
#define ATTEND(n) NAME(attend_rows)(n, a, item, position, row, key, &tile, s)
        for (int64_t row = 0; row < num_rows; row += ROWS) {
            FOR_ROWS(num_rows - row, ATTEND)
            if (row == 0) NAME(fetch_nothing)(&tile);
        }
    }
}

static void NAME(run_item)(const attention_args *a, const work_item *item, const work_item *ahead,
                           const NAME(scratch) *s) {
    int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, num_rows = item->num_queries * group;
    memset(s->out, 0, num_rows * dim * sizeof(float));
    for (int64_t row = 0; row < num_rows; row++) {
        const ELEMENT *q = (const ELEMENT *)a->q + NAME(row_offset)(a, item, row, a->q_stride);
#if EXPAND
        for (int64_t d = 0; d < dim; d += LANES) store_f32(s->q + row * dim + d, LOAD(q + d, LANES), LANES);
#else
        memcpy(s->q + row * dim, q, dim * sizeof(ELEMENT));
#endif
        s->maximum[row] = LOWEST;
        store_f32(s->sums + row * LANES, (vf){0}, LANES);
    }
    NAME(attend_keys)(a, item, ahead, num_rows, s);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t offset = NAME(row_offset)(a, item, row, a->num_heads * dim), head = offset / dim % a->num_heads;
        float sum = sum_lanes(load_f32(s->sums + row * LANES, LANES));
        if (item->split < 0) {
            NAME(write_row)(a, (ELEMENT *)a->out + offset, s->out + row * dim, sum);
            continue;
        }
        float *part = NAME(partial)(a, offset / dim / a->num_heads, head);
        part += item->split * a->num_heads * (dim + 2);
        memcpy(part, s->out + row * dim, dim * sizeof(float));
        part[dim] = s->maximum[row], part[dim + 1] = sum;
    }
}

/* Joins the splits of one head of a query. */
static void NAME(join_splits)(const attention_args *a, int64_t query, int64_t head, int64_t num_splits) {
    int64_t dim = a->head_dim, step = a->num_heads * (dim + 2);
    float *first = NAME(partial)(a, query, head), highest = LOWEST, sum = 0;
    for (int64_t i = 0; i < num_splits; i++) highest = fmaxf(highest, first[i * step + dim]);
    for (int64_t i = 0; i < num_splits; i++) {
        float *part = first + i * step, factor = exp2f(part[dim] - highest);
        sum += part[dim + 1] * factor;
        for (int64_t d = 0; d < dim; d += LANES)
            store_f32(first + d, load_f32(part + d, LANES) * factor + (i ? load_f32(first + d, LANES) : (vf){0}), LANES);
    }
    NAME(write_row)(a, (ELEMENT *)a->out + (query * a->num_heads + head) * dim, first, sum);
}

/* 0, or -1 where memory is short. */
int NAME(paged_attention)(const attention_args *a, team *t) {
    NAME(scratch) s = NAME(make_scratch)(a);
    work_cursor cursor = {0};
    int64_t count = count_items(a), number = s.out ? next_near_item(t, count) : -1;
    work_item item, ahead;
    if (number >= 0) find_item(a, number, &cursor, &ahead);
    while (number >= 0) {
        item = ahead;
        number = next_near_item(t, count);
        if (number >= 0) find_item(a, number, &cursor, &ahead);
        NAME(run_item)(a, &item, number >= 0 ? &ahead : NULL, &s);
    }
    if (a->max_splits > 1) team_barrier(t); /* the same on every thread */
    for (int64_t request = 0; request < a->num_requests && a->max_splits > 1; request++) {
        request_plan plan = plan_request(a, request);
        int64_t count = plan.num_splits > 1 ? plan.num_queries * a->num_heads : 0;
        for (int64_t i = part_start(t, count); i < part_end(t, count); i++)
            NAME(join_splits)(a, plan.first_query + i / a->num_heads, i % a->num_heads, plan.num_splits);
    }
    return s.out ? 0 : -1;
}
