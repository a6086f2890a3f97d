/* Collectives between processes of one host, over shared memory. See collectives.py for the contract and the protocol.

Layout: for each rank a header of HEADER_BYTES, then for each rank two slots of slot_bytes.
Every chunk of every collective is one round; round s uses slot s & 1 of the ranks that send in it.
They are operators (cpu_team.h): thread 0 talks to the other ranks, the others help with large sums. */
#define _GNU_SOURCE
#include <string.h>

#include "cpu_team.h"

#define HEADER_BYTES 256
#define SPINS_PER_LOOK 32
#define YIELD_NS 2000000ll
#define SLEEP_NS 50000l
#define BLOCK 512
#define TEAM_BYTES 65536 /* a sum from this size on is shared by the team */

enum { LATE = 0x10000, DISAGREES = 0x20000 }; /* plus the rank */

typedef struct {
    uint64_t round; /* the last round that this rank has entered: its slot of that round is complete */
    uint64_t sent_bytes[2]; /* what the rank sends in rounds of either parity, for the receivers to check */
} header_t;

typedef struct {
    uint8_t *memory;
    int64_t rank, size, slot_bytes, spin_ns, timeout_ns;
    uint64_t round;
    int64_t error; /* of thread 0 in this round, for the others */
} group_t;

typedef struct {
    group_t *group;
    uint8_t *x;
    int64_t bytes, is_bfloat16;
} reduce_args;

/* outs[r] and bytes[r] are rank r's tensor on rank 0; the others read only their own pointer. */
typedef struct {
    group_t *group;
    uint8_t *const *outs;
    const int64_t *bytes;
} gather_args;

typedef struct {
    group_t *group;
    uint8_t *x;
    int64_t bytes;
} broadcast_args;

static header_t *header(const group_t *g, int64_t rank) { return (header_t *)(g->memory + rank * HEADER_BYTES); }

static uint8_t *slot(const group_t *g, int64_t rank) {
    return g->memory + g->size * HEADER_BYTES + (2 * rank + (int64_t)(g->round & 1)) * g->slot_bytes;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int has_entered(const group_t *g, int64_t rank, uint64_t round) {
    return __atomic_load_n(&header(g, rank)->round, __ATOMIC_ACQUIRE) >= round;
}

/* Spin, then give the core away, then sleep. */
static int wait_for(const group_t *g, int64_t rank, uint64_t round) {
    if (has_entered(g, rank, round)) return 0;
    const int64_t start = now_ns();
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (has_entered(g, rank, round)) return 0;
            relax();
        }
        const int64_t waited = now_ns() - start;
        if (waited > g->timeout_ns) return LATE + (int)rank;
        if (waited > YIELD_NS) {
            const struct timespec pause = {0, SLEEP_NS};
            nanosleep(&pause, 0);
        } else if (waited > g->spin_ns) {
            sched_yield();
        }
    }
}

static int wait_for_all(const group_t *g, uint64_t round) {
    for (int64_t r = 0; r < g->size; r++) {
        const int late = r == g->rank ? 0 : wait_for(g, r, round);
        if (late) return late;
    }
    return 0;
}

/* Begin a round: our slot of this parity is free once all others have entered the round before. */
static int begin(group_t *g) {
    const int late = wait_for_all(g, g->round);
    if (!late) g->round++;
    return late;
}

static void enter(const group_t *g, const void *data, int64_t chunk_bytes, int64_t sent_bytes) {
    header_t *own = header(g, g->rank);
    if (chunk_bytes > 0) memcpy(slot(g, g->rank), data, (size_t)chunk_bytes);
    own->sent_bytes[g->round & 1] = (uint64_t)sent_bytes;
    __atomic_store_n(&own->round, g->round, __ATOMIC_RELEASE);
}

static int receive(const group_t *g, int64_t rank, int64_t expected_bytes) {
    const int late = wait_for(g, rank, g->round);
    if (late) return late;
    return header(g, rank)->sent_bytes[g->round & 1] == (uint64_t)expected_bytes ? 0 : DISAGREES + (int)rank;
}

static int64_t part(int64_t total, int64_t offset, int64_t most) {
    const int64_t rest = total - offset;
    return rest < 0 ? 0 : rest < most ? rest : most;
}

static void add_float32(float *sum, const float *x, int64_t n, int first) {
    for (int64_t i = 0; i < n; i++) sum[i] = first ? x[i] : sum[i] + x[i];
}

static void add_bfloat16(float *sum, const uint16_t *x, int64_t n, int first) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        sum[i] = first ? value : sum[i] + value;
    }
}

static void round_bfloat16(uint16_t *out, const float *sum, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &sum[i], 4);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

/* Sum a part of the slots of all ranks in rank order, so that every rank obtains the same bits. */
static void sum_slots(const group_t *g, uint8_t *out, int64_t start, int64_t end, int is_bfloat16) {
    float sum[BLOCK];
    const int64_t width = is_bfloat16 ? 2 : 4;
    for (int64_t offset = start; offset < end; offset += BLOCK * width) {
        const int64_t n = part(end, offset, BLOCK * width) / width;
        for (int64_t r = 0; r < g->size; r++) {
            const uint8_t *x = slot(g, r) + offset;
            if (is_bfloat16) add_bfloat16(sum, (const uint16_t *)x, n, r == 0);
            else add_float32(sum, (const float *)x, n, r == 0);
        }
        if (is_bfloat16) round_bfloat16((uint16_t *)(out + offset), sum, n);
        else memcpy(out + offset, sum, (size_t)n * 4);
    }
}

/* One round in which every rank sends a chunk to all. */
static int exchange(group_t *g, const uint8_t *x, int64_t chunk_bytes, int64_t sent_bytes) {
    int error = begin(g);
    if (error) return error;
    enter(g, x, chunk_bytes, sent_bytes);
    for (int64_t r = 0; r < g->size; r++)
        if (r != g->rank && (error = receive(g, r, sent_bytes))) return error;
    return 0;
}

int all_reduce(const reduce_args *a, team *t) {
    group_t *g = a->group;
    const int64_t width = a->is_bfloat16 ? 2 : 4;
    for (int64_t offset = 0; offset < a->bytes; offset += g->slot_bytes) {
        const int64_t chunk = part(a->bytes, offset, g->slot_bytes), num_values = chunk / width;
        const int is_shared = chunk >= TEAM_BYTES;
        if (t->thread == 0) g->error = exchange(g, a->x + offset, chunk, a->bytes);
        if (is_shared) team_barrier(t);
        else if (t->thread > 0) continue;
        if (g->error) return (int)g->error;
        const int64_t start = is_shared ? part_start(t, num_values) : 0;
        const int64_t end = is_shared ? part_end(t, num_values) : num_values;
        sum_slots(g, a->x + offset, start * width, end * width, a->is_bfloat16 != 0);
        if (is_shared) team_barrier(t); /* all have read the slots before the next round begins */
    }
    return 0;
}

int gather(const gather_args *a, team *t) {
    group_t *g = a->group;
    int64_t most = 0;
    for (int64_t r = 0; r < g->size; r++) most = a->bytes[r] > most ? a->bytes[r] : most;
    for (int64_t offset = 0; t->thread == 0 && offset < most; offset += g->slot_bytes) {
        int error = begin(g);
        if (error) return error;
        const int64_t chunk = g->rank == 0 ? 0 : part(a->bytes[g->rank], offset, g->slot_bytes);
        enter(g, a->outs[g->rank] + offset, chunk, a->bytes[g->rank]);
        for (int64_t r = 1; g->rank == 0 && r < g->size; r++) {
            if ((error = receive(g, r, a->bytes[r]))) return error;
            const int64_t size = part(a->bytes[r], offset, g->slot_bytes);
            if (size > 0) memcpy(a->outs[r] + offset, slot(g, r), (size_t)size);
        }
    }
    return 0;
}

int broadcast(const broadcast_args *a, team *t) {
    group_t *g = a->group;
    for (int64_t offset = 0; t->thread == 0 && offset < a->bytes; offset += g->slot_bytes) {
        const int64_t chunk = part(a->bytes, offset, g->slot_bytes);
        int error = begin(g);
        if (error) return error;
        enter(g, a->x + offset, g->rank == 0 ? chunk : 0, a->bytes);
        if (g->rank == 0) continue;
        if ((error = receive(g, 0, a->bytes))) return error;
        memcpy(a->x + offset, slot(g, 0), (size_t)chunk);
    }
    return 0;
}
