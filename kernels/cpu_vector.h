/* Vectors of floats in the compiler's own vector types: one source for AVX-512, AVX, SSE and NEON.

bf16 is a uint16_t: the high half of a float. Rounding is to nearest even. */
#ifndef CPU_VECTOR_H
#define CPU_VECTOR_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef int16_t vsh __attribute__((vector_size(LANES * 2)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* a > b ? a : b and a < b ? a : b: b where one of them is NaN, which is what x86's instructions do. */
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#else
INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return choose(a < b, a, b); }
#endif

INLINE vi lane_numbers(void) {
    vi lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

INLINE vf from_bf16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE vh to_bf16(vf x) {
#ifdef __AVX512BF16__ /* takes values below the smallest normal one as zero */
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet_nan = (bits >> 16) | 0x40;
    vu is_nan = (vu)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (quiet_nan & is_nan), vh);
#endif
}

INLINE float scalar_from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* IEEE half precision. */
INLINE vf load_f16(const uint16_t *from) {
    vh x;
    memcpy(&x, from, sizeof x);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__) && LANES == 8
    return (vf)_mm256_cvtph_ps((__m128i)x);
#else
    vu wide = __builtin_convertvector(x, vu); /* the exponent is rebased by a product, subnormal numbers included */
    vf magnitude = (vf)((wide & 0x7fff) << 13) * 0x1p112f;
    vu is_special = (vu)((wide & 0x7c00) == 0x7c00) & 0x7f800000; /* infinity and NaN stay what they are */
    return (vf)((vu)magnitude | is_special | (wide & 0x8000) << 16);
#endif
}

/* Loads and stores of the first n <= LANES elements, n == LANES being the fast case; lanes past n read as 0. */
INLINE vf load_f32(const float *from, int64_t n) {
    vf x = {0};
    if (n >= LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, n * sizeof(float));
    return x;
}
INLINE vf load_bf16(const bf16 *from, int64_t n) {
    vh x = {0};
    if (n >= LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, n * sizeof(bf16));
    return from_bf16(x);
}
INLINE void store_f32(float *to, vf x, int64_t n) {
    if (n >= LANES) memcpy(to, &x, sizeof x);
    else memcpy(to, &x, n * sizeof(float));
}
INLINE void store_bf16(bf16 *to, vf x, int64_t n) {
    vh y = to_bf16(x);
    if (n >= LANES) memcpy(to, &y, sizeof y);
    else memcpy(to, &y, n * sizeof(bf16));
}

/* Reductions over the lanes, by halves. */
INLINE float sum_lanes(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] += a[i + half];
    return a[0];
}
INLINE float max_lanes(vf x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float a[LANES];
    memcpy(a, &x, sizeof a);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
}

/* Whether any lane is greater; NaN is not. */
INLINE int is_any_above(vf x, float bound) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    return max_lanes(x) > bound;
#endif
}

/* e^x within 2 units in the last place for -87 <= x <= 88; clamped outside, NaN stays NaN.
   x = n ln 2 + r; e^r by the degree-6 Taylor polynomial on |r| <= ln 2 / 2; 2^n through the exponent field. */
INLINE vf vexp(vf x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = vmin(splat(88.0f), vmax(splat(-87.0f), x));
    vf shifted = x * 1.44269504f + shift;
    vf n = shifted - shift;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

#define LOG2E 1.44269504f

/* 2^x for x <= 127: within 4 units in the last place, or with a relative error of 3e-6 (`is_for_bf16`, a constant); at
   most 2^-126 below -126. NaN stays NaN. Cheaper than vexp. */
INLINE vf vexp2(vf x, int is_for_bf16) {
#ifdef __AVX512F__
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = vmin(splat(127.0f), vmax(splat(-126.0f), x));
    vf shifted = x + 12582912.0f, n = shifted - 12582912.0f; /* as in vexp */
#endif
    vf r = x - n, p;
    if (is_for_bf16) { /* minimax on |r| <= 1/2 */
        p = r * 9.570102207e-3f + 5.591786280e-2f;
        p = p * r + 0.240247443f;
        p = p * r + 0.693121791f;
        p = p * r + 0.999999285f;
    } else { /* Cephes' exp2f */
        p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
        p = p * r + 9.618437357674640e-3f;
        p = p * r + 5.550332471162809e-2f;
        p = p * r + 2.402264791363012e-1f;
        p = p * r + 6.931472028550421e-1f;
        p = p * r + 1.0f;
    }
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (vf)((vi)p + ((vi)shifted << 23));
#endif
}

INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

#endif
