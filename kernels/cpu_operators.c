/* The CPU operators, one copy for fp32 and one for bf16. Contracts: the Python module of each operator. */
#include "cpu_attention_plan.h"
#include "cpu_vector.h"

typedef struct {
    void *q, *k;
    const void *v;
    void *k_cache, *v_cache;
    const float *cos, *sin;
    const int32_t *page_table, *row_of, *positions;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, page_size, max_pages;
    int64_t q_stride, k_stride, v_stride, num_threads;
} rotary_args;

#define ELEMENT float
#define WIDTH 1
#define LOAD load_f32
#define STORE store_f32
#define NAME(x) x##_f32
#define MULTIPLY_PAIRS 0
#include "cpu_elementwise.h"
#include "cpu_attention.h"
#undef ELEMENT
#undef WIDTH
#undef LOAD
#undef STORE
#undef NAME
#undef MULTIPLY_PAIRS

#define ELEMENT bf16
#define WIDTH 2
#define LOAD load_bf16
#define STORE store_bf16
#define NAME(x) x##_bf16
#ifdef __AVX512BF16__
#define MULTIPLY_PAIRS 1
#else
#define MULTIPLY_PAIRS 0
#endif
#include "cpu_elementwise.h"
#include "cpu_attention.h"
