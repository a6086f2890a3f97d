/* Linear layers on bf16 activations. Contracts: the Python module of each format. */
#define ELEMENT bf16
#define WIDTH 2
#define LOAD load_bf16
#define STORE store_bf16
#define SCALAR(x) scalar_from_bf16(x)
#define NAME(x) x##_bf16

#include "cpu_linear.h"
