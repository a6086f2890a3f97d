/* Sampling of one token per row. Contract: sampling.py, whose torch version gives the same ids, bit for bit; noise.py.

So that every version computes the same numbers, products and sums are not contracted here. */
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "cpu_vector.h"

#define BLOCK 64      /* tokens whose noise is drawn together: 16 Philox blocks of 4 words */
#define BUCKETS 2048  /* of the logits below the largest, for top-p */
#define BUCKETS_PER_UNIT 64.0f
#define MASS_SCALE 1099511627776.0f /* 2^40 */
#define MAX_GUMBEL 22.9

typedef struct {
    const float *logits, *temperature, *top_p, *log_min_p;
    const int64_t *top_k, *seeds, *positions;
    int64_t *ids;
    int64_t num_rows, vocab_size, num_threads;
} sampling_args;

static void philox_blocks(uint32_t words[4][BLOCK / 4], uint64_t seed, uint64_t position, uint32_t first) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t *restrict c0 = words[0], *restrict c1 = words[1], *restrict c2 = words[2], *restrict c3 = words[3];
    for (uint32_t i = 0; i < BLOCK / 4; i++) {
        c0[i] = first + i, c1[i] = (uint32_t)position, c2[i] = (uint32_t)(position >> 32), c3[i] = 0;
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < BLOCK / 4; i++) {
            uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c1[i] = (uint32_t)b, c3[i] = (uint32_t)a;
        }
}

/* noise.log */
static double exact_log(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    int64_t exponent = (bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000;
    double mantissa;
    memcpy(&mantissa, &bits, 8);
    if (mantissa >= 1.4142135623730951) mantissa *= 0.5, exponent++;
    double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s, series = 1.0 / 21.0;
    for (int denominator = 19; denominator > 0; denominator -= 2) series = series * square + 1.0 / denominator;
    return (double)exponent * 0.6931471805599453 + (s * 2.0) * series;
}

static double gumbel(uint32_t word) { return -exact_log(-exact_log(((double)word + 0.5) * 0x1p-32)); }

/* A word below this gives noise below `need`; a little lower than exact. */
static uint32_t smallest_word(double need) {
    double word = exp(-exp(-need)) * 0x1p32 - 4.0;
    return word < 0 ? 0 : word > 4294967295.0 ? 4294967295u : (uint32_t)word;
}

typedef struct {
    double score;
    int64_t id;
} winner;

INLINE float block_max(const float *z, int64_t n) {
    if (n < BLOCK) {
        float top = -INFINITY;
        for (int64_t i = 0; i < n; i++) top = z[i] > top ? z[i] : top;
        return top;
    }
    vf top = load_f32(z, LANES);
    for (int i = LANES; i < BLOCK; i += LANES) top = vmax(load_f32(z + i, LANES), top);
    return max_lanes(top);
}

/* Scores the tokens of one block that are at or above the threshold and may beat the best so far. */
static winner score_block(const float *z, int64_t first, int64_t n, float threshold, float top, uint64_t seed,
                          uint64_t position, winner best) {
    uint32_t words[4][BLOCK / 4];
    philox_blocks(words, seed, position, (uint32_t)(first / 4));
    uint32_t needed = smallest_word(best.score - top);
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = words[i % 4][i / 4];
        if (word < needed || z[i] < threshold) continue;
        winner candidate = {(double)z[i] + gumbel(word), first + i};
        if (candidate.score > best.score || (candidate.score == best.score && candidate.id < best.id)) {
            best = candidate;
            needed = smallest_word(best.score - top);
        }
    }
    return best;
}

/* argmax of z + noise over the tokens at or above the threshold; `top_id` is the largest's. */
static int64_t gumbel_max(const float *z, int64_t vocab_size, int64_t top_id, float threshold, uint64_t seed,
                          uint64_t position) {
    winner best = {-INFINITY, vocab_size};
    int64_t start = top_id / BLOCK * BLOCK;
    int64_t size = vocab_size - start < BLOCK ? vocab_size - start : BLOCK;
    best = score_block(z + start, start, size, threshold, 0.0f, seed, position, best);
    for (int64_t first = 0; first < vocab_size; first += BLOCK) {
        int64_t n = vocab_size - first < BLOCK ? vocab_size - first : BLOCK;
        float top = block_max(z + first, n);
        if (top >= threshold && (double)top + MAX_GUMBEL >= best.score && first != start)
            best = score_block(z + first, first, n, threshold, top, seed, position, best);
    }
    return best.id;
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* The k-th largest of `count` values, which it reorders (quickselect, on the median of three). */
static float kth_largest(float *values, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1, target = k - 1;
    while (low < high) {
        float a = values[low], b = values[(low + high) / 2], c = values[high];
        float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i <= j) {
                float swapped = values[i];
                values[i++] = values[j], values[j--] = swapped;
            }
        }
        if (target <= j) high = j;
        else if (target >= i) low = i;
        else return values[target];
    }
    return values[target];
}

/* Keeps the candidates for the k largest in `buffer`; blocks that lie below the k-th of those cost one comparison. */
static float top_k_threshold(const float *z, int64_t vocab_size, int64_t k, float *buffer) {
    int64_t count = 0, limit = 4 * k + BLOCK;
    float threshold = -INFINITY;
    for (int64_t first = 0; first < vocab_size; first += BLOCK) {
        int64_t n = vocab_size - first < BLOCK ? vocab_size - first : BLOCK;
        if (block_max(z + first, n) < threshold) continue;
        for (int64_t i = 0; i < n; i++)
            if (z[first + i] >= threshold) buffer[count++] = z[first + i];
        if (count + BLOCK > limit) {
            threshold = kth_largest(buffer, count, k);
            count = k; /* the k largest lie in front */
        }
    }
    return kth_largest(buffer, count, k);
}

INLINE int64_t mass_of(float z) {
    /* sampling._exp, on one element */
    const float shift = 12582912.0f;
    z = z < -87.0f ? -87.0f : z;
    float n = (z * 1.44269504f + shift) - shift, r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits;
    memcpy(&bits, &p, 4);
    bits += (int32_t)((uint32_t)(int32_t)n << 23);
    memcpy(&p, &bits, 4);
    return (int64_t)(p * MASS_SCALE);
}

INLINE int32_t bucket_of(float z) {
    float bucket = -z * BUCKETS_PER_UNIT;
    return (int32_t)(bucket < BUCKETS - 1 ? bucket : BUCKETS - 1);
}

/* The largest value at and above which the mass reaches top_p of the whole: by buckets, then inside one. */
static float top_p_threshold(const float *z, int64_t vocab_size, float threshold, float top_p, float *buffer) {
    int64_t mass[BUCKETS] = {0}, total = 0, sum = 0, bucket = 0, count = 0;
    for (int64_t first = 0; first < vocab_size; first += BLOCK) {
        int64_t n = vocab_size - first < BLOCK ? vocab_size - first : BLOCK;
        if (block_max(z + first, n) < threshold) continue;
        int64_t masses[BLOCK];
        int32_t buckets[BLOCK];
        for (int64_t i = 0; i < n; i++) {
            masses[i] = z[first + i] >= threshold ? mass_of(z[first + i]) : 0;
            buckets[i] = bucket_of(z[first + i]);
        }
        for (int64_t i = 0; i < n; i++) mass[buckets[i]] += masses[i];
    }
    for (int i = 0; i < BUCKETS; i++) total += mass[i];
    int64_t needed = (int64_t)((double)top_p * (double)total);
    if (needed < 1) needed = 1;
    while (bucket < BUCKETS - 1 && sum + mass[bucket] < needed) sum += mass[bucket++];
    for (int64_t i = 0; i < vocab_size; i++)
        if (z[i] >= threshold && bucket_of(z[i]) == bucket) buffer[count++] = z[i];
    qsort(buffer, count, sizeof *buffer, descending);
    for (int64_t i = 0; i < count; i++) {
        sum += mass_of(buffer[i]);
        if (sum >= needed) return buffer[i];
    }
    return count ? buffer[count - 1] : threshold;
}

/* The largest value's first index, or -1 where a value is NaN or none is above -inf. */
static int64_t argmax(const float *x, int64_t size) {
    vf top = splat(-INFINITY);
    vi is_nan = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf value = load_f32(x + i, LANES);
        top = vmax(value, top);
        is_nan |= value != value;
    }
    float highest = max_lanes(top);
    int32_t nans = 0;
    for (int lane = 0; lane < LANES; lane++) nans |= is_nan[lane];
    for (; i < size; i++) {
        highest = x[i] > highest ? x[i] : highest;
        nans |= x[i] != x[i];
    }
    if (nans || highest == -INFINITY) return -1;
    for (i = 0; i + BLOCK <= size && block_max(x + i, BLOCK) < highest;) i += BLOCK;
    while (x[i] != highest) i++;
    return i;
}

/* `memory` holds 2 * vocab_size floats. */
static int64_t sample_row(const sampling_args *a, int64_t row, float *memory) {
    const float *logits = a->logits + row * a->vocab_size;
    int64_t vocab_size = a->vocab_size, top_id = argmax(logits, vocab_size), top_k = a->top_k[row];
    float temperature = a->temperature[row], threshold = -FLT_MAX;
    if (top_id < 0 || !(temperature > 0) || !isfinite(logits[top_id] / temperature)) return top_id;
    float *z = memory, *buffer = memory + vocab_size, top = logits[top_id] / temperature;
    for (int64_t i = 0; i < vocab_size; i++) z[i] = logits[i] / temperature - top;
    if (top_k >= 1 && top_k < vocab_size) {
        float k_threshold = top_k_threshold(z, vocab_size, top_k, buffer);
        threshold = k_threshold > threshold ? k_threshold : threshold;
    }
    if (a->top_p[row] < 1) {
        float p_threshold = top_p_threshold(z, vocab_size, threshold, a->top_p[row], buffer);
        threshold = p_threshold > threshold ? p_threshold : threshold;
    }
    if (a->log_min_p[row] > threshold) threshold = a->log_min_p[row];
    return gumbel_max(z, vocab_size, top_id, threshold, (uint64_t)a->seeds[row], (uint64_t)a->positions[row]);
}

/* 0, or -1 where memory is short. */
int sample(const sampling_args *a) {
    int failed = 0;
#pragma omp parallel num_threads(a->num_threads) if (a->num_rows > 1) reduction(| : failed)
    {
        float *memory = malloc((2 * a->vocab_size + BLOCK) * sizeof *memory);
        failed |= memory == NULL;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < a->num_rows; row++)
            if (memory) a->ids[row] = sample_row(a, row, memory);
        free(memory);
    }
    return failed ? -1 : 0;
}

/* Noise for tests: one value per (seed, position, id). */
void gumbel_noise(double *out, const int64_t *seeds, const int64_t *positions, const int64_t *ids, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4][BLOCK / 4];
        philox_blocks(words, (uint64_t)seeds[i], (uint64_t)positions[i], (uint32_t)(ids[i] / 4));
        out[i] = gumbel(words[ids[i] % 4][0]);
    }
}
