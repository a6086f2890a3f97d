/* Runs a list of operators on one team of threads: what a graph is on a CPU. */
#ifdef _OPENMP
#include <omp.h>
#endif
#include "cpu_team.h"

typedef struct {
    int (*operator)(const void *args, team *t);
    const void *args;
} node;

/* All threads stop behind the operator that failed: a later failure, which only some may see yet, has a higher number. */
static void run_nodes(const node *nodes, int64_t num_nodes, team *t) {
    int64_t *error = &t->shared->error;
    for (int64_t i = 0; i < num_nodes; i++) {
        int64_t none = 0, code = (uint32_t)nodes[i].operator(nodes[i].args, t);
        if (code)
            __atomic_compare_exchange_n(error, &none, i << 32 | code, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        team_barrier(t);
        int64_t failure = __atomic_load_n(error, __ATOMIC_RELAXED);
        if (failure && failure >> 32 <= i) return;
    }
}

/* 0, or where an operator gave a code that is not: its place << 32 | the code. Those behind it have not run. */
int64_t run_graph(const node *nodes, int64_t num_nodes, int64_t num_threads) {
    team_shared shared = {0};
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
#ifdef _OPENMP
#pragma omp parallel num_threads((int)num_threads) if (num_threads > 1)
    {
        team t = {omp_get_thread_num(), omp_get_num_threads(), 0, &shared};
        run_nodes(nodes, num_nodes, &t);
    }
#else
    (void)num_threads;
    team t = {0, 1, 0, &shared};
    run_nodes(nodes, num_nodes, &t);
#endif
    return shared.error;
}
