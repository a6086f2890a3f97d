/* The CPU operators on bf16. Contracts: the Python module of each operator. */
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
