/* The noise of noise.py, bit for bit: the including file must not contract products and sums. */
#ifndef CPU_NOISE_H
#define CPU_NOISE_H

#include "cpu_vector.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define PHILOX_BLOCKS 16 /* of four words each, drawn together: the noise of 64 tokens */
#define PHILOX_LANES (LANES / 2)
#define PHILOX_VECTORS (PHILOX_BLOCKS / PHILOX_LANES)
#define MAX_GUMBEL 22.9

typedef uint64_t vw __attribute__((vector_size(LANES * 4))); /* words, each with anything in its upper half */
typedef uint32_t vw_low __attribute__((vector_size(LANES * 2)));

/* The 64-bit products of the words. */
INLINE vw multiply(vw x, uint32_t y) {
#if defined(__AVX512F__)
    return (vw)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(y));
#elif defined(__AVX2__)
    return (vw)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(y));
#elif defined(__SSE2__) && LANES == 4
    return (vw)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(y));
#elif defined(__ARM_NEON)
    return (vw)vmull_u32(vmovn_u64((uint64x2_t)x), vdup_n_u32(y));
#else
    return (x & 0xffffffffu) * (uint64_t)y;
#endif
}

/* words[i % 4][i / 4] belongs to token 4 * first + i. */
static void philox_blocks(uint32_t words[4][PHILOX_BLOCKS], uint64_t seed, uint64_t position, uint32_t first) {
    vw k0 = (vw){0} + (uint32_t)seed, k1 = (vw){0} + (seed >> 32);
    vw c[4][PHILOX_VECTORS];
    for (int v = 0; v < PHILOX_VECTORS; v++) {
        for (int i = 0; i < PHILOX_LANES; i++) c[0][v][i] = first + (uint32_t)(v * PHILOX_LANES + i);
        c[1][v] = (vw){0} + (uint32_t)position;
        c[2][v] = (vw){0} + (position >> 32);
        c[3][v] = (vw){0};
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int v = 0; v < PHILOX_VECTORS; v++) {
            vw product0 = multiply(c[0][v], 0xD2511F53u), product1 = multiply(c[2][v], 0xCD9E8D57u);
            c[0][v] = product1 >> 32 ^ c[1][v] ^ k0, c[1][v] = product1;
            c[2][v] = product0 >> 32 ^ c[3][v] ^ k1, c[3][v] = product0;
        }
    for (int word = 0; word < 4; word++)
        for (int v = 0; v < PHILOX_VECTORS; v++) {
            vw_low low = __builtin_convertvector(c[word][v], vw_low);
            memcpy(words[word] + v * PHILOX_LANES, &low, sizeof low);
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

#endif
