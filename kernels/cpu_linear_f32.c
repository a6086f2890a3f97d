/* Linear layers on float32 activations. Contracts: the Python module of each format. */
#define ELEMENT float
#define WIDTH 1
#define LOAD load_f32
#define STORE store_f32
#define SCALAR(x) (x)
#define NAME(x) x##_f32

#include "cpu_linear.h"
