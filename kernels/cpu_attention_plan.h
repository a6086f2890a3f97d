/* Paged attention: its arguments, tile sizes, and how the work is cut into items. The same for every element type. */
#ifndef CPU_ATTENTION_PLAN_H
#define CPU_ATTENTION_PLAN_H

#include <math.h>
#include <stdlib.h>

#include "cpu_vector.h"

#define GROUP 16 /* keys that are read in place together, where a page holds as many */
#define TILE_GROUPS 4
#define TILE (GROUP * TILE_GROUPS) /* keys of one step of the online softmax; tiles lie at multiples of TILE */
#define SPLIT 512                  /* keys after which a single query's work is split: a constant, whatever the batch */
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

typedef struct {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int32_t *page_table, *query_starts, *kv_lens;
    int64_t num_requests, num_heads, num_kv_heads, head_dim, page_size, max_pages, q_stride;
    int64_t window; /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
    int64_t num_threads;
} attention_args;

/* Some queries of a request and one KV head, over keys [first_key, end_key). `partial`: where an item of several that
   share a query leaves its unnormalised result, in units of items; -1 where it is the only one. */
typedef struct {
    int64_t request, kv_head, first_query, num_queries, first_key, end_key, partial;
} work_item;

static int64_t queries_per_block(const attention_args *a) {
    int64_t group = a->num_heads / a->num_kv_heads;
    return group >= BLOCK_ROWS ? 1 : BLOCK_ROWS / group;
}

static int64_t first_visible(const attention_args *a, int64_t position) {
    return a->window && position >= a->window ? position - a->window + 1 : 0;
}

/* Adds one request's items for one KV head to `items` (counts only where it is NULL); the longest come first. */
static int64_t plan_request(const attention_args *a, int64_t request, int64_t kv_head, work_item *items,
                            int64_t *num_partials) {
    int64_t num_queries = a->query_starts[request + 1] - a->query_starts[request], kv_len = a->kv_lens[request];
    int64_t num_items = 0, block = queries_per_block(a);
    if (num_queries == 1) {
        int64_t first_key = first_visible(a, kv_len - 1);
        int64_t first_split = first_key / SPLIT, num_splits = (kv_len - 1) / SPLIT - first_split + 1;
        for (int64_t i = 0; i < num_splits; i++) {
            int64_t start = (first_split + i) * SPLIT, partial = num_splits > 1 ? (*num_partials)++ : -1;
            work_item item = {request, kv_head, 0, 1, start > first_key ? start : first_key,
                              i + 1 < num_splits ? start + SPLIT : kv_len, partial};
            if (items) items[num_items] = item;
            num_items++;
        }
        return num_items;
    }
    for (int64_t first = (num_queries - 1) / block * block; num_queries && first >= 0; first -= block) {
        int64_t size = num_queries - first < block ? num_queries - first : block;
        int64_t position = kv_len - num_queries + first;
        work_item item = {request, kv_head, first, size, first_visible(a, position), position + size, -1};
        if (items) items[num_items] = item;
        num_items++;
    }
    return num_items;
}

static int64_t plan_work(const attention_args *a, work_item *items, int64_t *num_partials) {
    int64_t num_items = 0;
    for (int64_t request = 0; request < a->num_requests; request++)
        for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++)
            num_items += plan_request(a, request, kv_head, items ? items + num_items : NULL, num_partials);
    return num_items;
}

/* Each thread's scratch memory, kept between calls. */
static void *thread_scratch(int64_t num_bytes) {
    static _Thread_local void *memory;
    static _Thread_local int64_t size;
    if (size < num_bytes) {
        free(memory);
        memory = aligned_alloc(64, (num_bytes + 63) / 64 * 64);
        size = memory ? num_bytes : 0;
    }
    return memory;
}

#endif
