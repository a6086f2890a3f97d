/* How an operator runs: every thread of a team calls it with the same arguments and shares out the work.

An operator is `int name(const void *args, team *t)`; 0 is success, the same on every thread or on one alone. Between two
operators stands a barrier, so an operator may read what the one before it wrote, whichever thread did. */
#ifndef CPU_TEAM_H
#define CPU_TEAM_H

#include <sched.h>
#include <stdint.h>
#include <time.h>

#define MAX_THREADS 256
#define SPINS_BEFORE_YIELD 300
#define YIELDS_BEFORE_SLEEP 2000

/* On a cache line of its own, in phases of either parity. */
typedef struct {
    int64_t count[2] __attribute__((aligned(64)));
} item_counter;

/* What the threads share. */
typedef struct {
    int64_t arrived __attribute__((aligned(64))); /* barriers passed, times threads */
    item_counter items;                           /* handed out to all */
    item_counter near_items[MAX_THREADS];         /* handed out of each thread's part */
    int64_t error __attribute__((aligned(64)));     /* the first failure: number of the operator << 32 | its code */
} team_shared;

/* One thread's view. A phase is what lies between two barriers. */
typedef struct {
    int64_t thread, num_threads, phase;
    team_shared *shared;
} team;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins while the others have cores of their own, then gives the core away. */
static inline void wait_until_at_least(const int64_t *counter, int64_t value) {
    for (int64_t spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < value; spins++) {
        if (spins < SPINS_BEFORE_YIELD) relax();
        else if (spins < SPINS_BEFORE_YIELD + YIELDS_BEFORE_SLEEP) sched_yield();
        else nanosleep(&(struct timespec){0, 50000}, 0);
    }
}

/* All threads have come here. Ends the phase: items are numbered from 0 again. */
static inline void team_barrier(team *t) {
    team_shared *s = t->shared;
    t->phase++;
    /* The counters of the new phase: last used two phases ago, by threads that have all come since. */
    if (t->thread == 0) s->items.count[t->phase & 1] = 0;
    s->near_items[t->thread].count[t->phase & 1] = 0;
    if (t->num_threads == 1) return;
    __atomic_add_fetch(&s->arrived, 1, __ATOMIC_ACQ_REL);
    wait_until_at_least(&s->arrived, t->phase * t->num_threads);
}

static inline int64_t take(const team *t, item_counter *counter) {
    int64_t *count = &counter->count[t->phase & 1];
    return t->num_threads == 1 ? (*count)++ : __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
}

/* The next number of 0, 1, 2 ..., each given to one thread: work of uneven size. */
static inline int64_t next_item(team *t) { return take(t, &t->shared->items); }

/* thread's part of 0..count in equal runs. */
static inline int64_t run_start(const team *t, int64_t thread, int64_t count) { return count * thread / t->num_threads; }

/* This thread's part of 0..count. */
static inline int64_t part_start(const team *t, int64_t count) { return run_start(t, t->thread, count); }
static inline int64_t part_end(const team *t, int64_t count) { return run_start(t, t->thread + 1, count); }

/* The next number of this thread's part of 0..count, then of the others' (their cores may be busy elsewhere); -1 when all
   are taken. Neighbours stay with one thread, which streams memory twice as fast as threads that take turns. */
static inline int64_t next_near_item(team *t, int64_t count) {
    for (int64_t i = 0; i < t->num_threads; i++) {
        int64_t owner = (t->thread + i) % t->num_threads;
        int64_t item = run_start(t, owner, count) + take(t, &t->shared->near_items[owner]);
        if (item < run_start(t, owner + 1, count)) return item;
    }
    return -1;
}

#endif
