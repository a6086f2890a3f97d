/* Memory of a thread's own. */
#ifndef CPU_SCRATCH_H
#define CPU_SCRATCH_H

#include <stdint.h>
#include <stdlib.h>

/* Each thread's scratch memory, kept between calls; NULL where there is none. */
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
