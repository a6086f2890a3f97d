/* The CPU operators on fp32. Contracts: the Python module of each operator. */
#define ELEMENT float
#define WIDTH 1
#define LOAD load_f32
#define STORE store_f32
#define NAME(x) x##_f32
#define MULTIPLY_PAIRS 0

#include "cpu_elementwise.h"
#include "cpu_attention.h"
