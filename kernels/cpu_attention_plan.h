/* Paged attention: its arguments, tile sizes, and how the work is cut into items. The same for every element type. */
#ifndef CPU_ATTENTION_PLAN_H
#define CPU_ATTENTION_PLAN_H

#include <math.h>
#include <stdlib.h>

#include "cpu_scratch.h"
#include "cpu_team.h"
#include "cpu_vector.h"

#define GROUP 16 /* keys that are read in place together, where a page holds as many */
#define TILE_GROUPS 4
#define TILE (GROUP * TILE_GROUPS) /* keys of one step of the online softmax; tiles lie at multiples of TILE */
#define SPLIT 512                  /* keys after which a request's work is split, */
#define MAX_SPLITS 16              /* into so many parts at most: constants, whatever the batch */
#define REQUESTS_FOR_ALL_HEADS 4   /* for each thread: so many make items enough */
#define BLOCK_ROWS 96              /* query rows (queries x heads of a group) that share a tile */

/* The register block of the products: ROWS rows of VECTORS vectors, with room for the operands. */
#if LANES == 16
#define ROWS 6
#define VECTORS 4
#elif LANES == 8
#define ROWS 6
#define VECTORS 2
#elif defined(__aarch64__)
#define ROWS 6
#define VECTORS 4
#else
#define ROWS 3
#define VECTORS 4
#endif
/* Calls `call` with the constant min(num_rows, ROWS). */
#if ROWS == 6
#define FOR_ROWS(num_rows, call) \
    switch (num_rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6); break; \
    }
#else
#define FOR_ROWS(num_rows, call) \
    switch (num_rows) { \
    case 1: call(1); break; \
    case 2: call(2); break; \
    default: call(3); break; \
    }
#endif
#define GROUP_VECTORS (GROUP / LANES)
#define PASS_GROUPS (VECTORS / GROUP_VECTORS)

/* Request r's queries are query_starts[r] to query_starts[r + 1], or the one query r where that is NULL. */
typedef struct {
    const void *q, *k_cache, *v_cache;
    void *out;
    float *partials; /* [queries, max_splits, heads, head_dim + 2]; unused where max_splits is 1 */
    const int32_t *page_table, *query_starts, *kv_lens;
    int64_t num_requests, num_heads, num_kv_heads, head_dim, page_size, table_stride, q_stride;
    int64_t max_splits; /* no fewer than any request has */
    int64_t window;     /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
} attention_args;

/* Some queries of a request (numbered within it) and some KV heads, over keys [first_key, end_key). `split`: where the
   item leaves its unnormalised result, because others share its queries; -1 where it is alone. */
typedef struct {
    int64_t request, kv_head, num_kv_heads, first_query, num_queries, first_key, end_key, split;
} work_item;

/* How one request is cut, the same whatever else is in the batch. */
typedef struct {
    int64_t first_query, num_queries, kv_len, num_blocks; /* blocks of queries */
    int64_t first_split, num_splits, split_len;           /* runs of keys, numbered from the first key of all */
} request_plan;

typedef struct {
    int64_t request, first_item; /* the first item of this request */
} work_cursor;

static int64_t queries_per_block(const attention_args *a) {
    int64_t group = a->num_heads / a->num_kv_heads;
    return group >= BLOCK_ROWS ? 1 : BLOCK_ROWS / group;
}

static int64_t first_visible(const attention_args *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* A request of more than one block of queries is not split along its keys: it has items enough. */
static request_plan plan_request(const attention_args *a, int64_t request) {
    request_plan plan = {request, 1, a->kv_lens[request], 1, 0, 1, 0};
    if (a->query_starts) {
        plan.first_query = a->query_starts[request];
        plan.num_queries = a->query_starts[request + 1] - plan.first_query;
        plan.num_blocks = (plan.num_queries + queries_per_block(a) - 1) / queries_per_block(a);
    }
    int64_t share = (plan.kv_len + MAX_SPLITS - 1) / MAX_SPLITS;
    plan.split_len = share <= SPLIT ? SPLIT : (share + TILE - 1) / TILE * TILE;
    if (plan.num_blocks == 1 && plan.kv_len > 0) {
        plan.first_split = first_visible(a, plan.kv_len - plan.num_queries) / plan.split_len;
        plan.num_splits = (plan.kv_len - 1) / plan.split_len + 1 - plan.first_split;
    }
    return plan;
}

/* KV heads of an item. Those of a page lie behind each other, so many requests of one query take them together: memory
   streams better. Results are the same. */
static int64_t heads_per_item(const attention_args *a, int64_t num_threads) {
    return !a->query_starts && a->num_requests >= REQUESTS_FOR_ALL_HEADS * num_threads ? a->num_kv_heads : 1;
}

static int64_t count_items(const attention_args *a, int64_t heads_each) {
    int64_t count = 0;
    for (int64_t request = 0; request < a->num_requests; request++) {
        request_plan plan = plan_request(a, request);
        count += plan.num_blocks * plan.num_splits * (a->num_kv_heads / heads_each);
    }
    return count;
}

/* Item `number` of count_items. The longest items of a request come first. */
static work_item find_item(const attention_args *a, int64_t heads_each, int64_t number, work_cursor *cursor) {
    if (number < cursor->first_item) *cursor = (work_cursor){0};
    request_plan plan = plan_request(a, cursor->request);
    int64_t each = plan.num_blocks * plan.num_splits;
    while (number >= cursor->first_item + each * (a->num_kv_heads / heads_each)) {
        cursor->first_item += each * (a->num_kv_heads / heads_each);
        plan = plan_request(a, ++cursor->request);
        each = plan.num_blocks * plan.num_splits;
    }
    int64_t local = number - cursor->first_item, part = local % each, prefix = plan.kv_len - plan.num_queries;
    int64_t block = queries_per_block(a), first = (plan.num_blocks - 1 - part / plan.num_splits) * block;
    int64_t count = plan.num_queries - first < block ? plan.num_queries - first : block;
    int64_t first_key = first_visible(a, prefix + first), end_key = prefix + first + count;
    work_item item = {cursor->request, local / each * heads_each, heads_each, first, count, first_key, end_key, -1};
    if (plan.num_splits > 1) {
        item.split = part % plan.num_splits;
        int64_t start = (plan.first_split + item.split) * plan.split_len, end = start + plan.split_len;
        if (item.first_key < start) item.first_key = start;
        if (item.end_key > end) item.end_key = end;
    }
    return item;
}

#endif
