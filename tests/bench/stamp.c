/* An operator that writes down when it runs, to stand between those of a recorded step. Its own time is that of one
barrier, some hundred nanoseconds. */
#include "../../kernels/cpu_team.h"

typedef struct {
    int64_t *nanoseconds;
} stamp_args;

int stamp(const stamp_args *a, team *t) {
    struct timespec now;
    if (t->thread) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *a->nanoseconds = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    return 0;
}
