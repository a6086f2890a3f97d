/* Sums of products over pairs of the inner dimension, for activations of one element type.

A weight vector holds, for each of LANES columns, the weights of inner indices k and k + 1. With AVX512-BF16 both are
multiplied by one instruction (MULTIPLIES_PAIRS; bf16 factors, fp32 sums), else as two products of floats. */
#include "cpu_vector.h"

#if defined(__AVX512BF16__) && WIDTH == 2
#define MULTIPLIES_PAIRS 1
#else
#define MULTIPLIES_PAIRS 0
#endif

#if MULTIPLIES_PAIRS
typedef __m512bh pair;
/* As assembly, because gcc 12 copies and spills accumulators of the intrinsic. */
INLINE vf multiply_add(vf sum, pair x, pair w) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}
INLINE pair broadcast_pair(const ELEMENT *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (pair)_mm512_set1_epi32(both);
}
INLINE pair load_dense(const ELEMENT *w) { return (pair)_mm512_loadu_si512(w); }
/* 0x4300 | n is the bf16 of 128 + n: the caller takes the 128 out again, times the sum of the activations. */
#define INT4_BIAS 128.0f
INLINE pair unpack_int4(const uint8_t *w, int quarter) {
    __m512i words = _mm512_srli_epi16(_mm512_loadu_si512(w), 4 * quarter);
    words = _mm512_ternarylogic_epi32(words, _mm512_set1_epi16(0x000f), _mm512_set1_epi16(0x4300), 0xea);
    return (pair)words;
}
INLINE pair unpack_int8(const int8_t *w) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)w)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w + 16))));
    return (pair)_mm512_cvtne2ps_pbh(high, low);
}
#else
typedef struct {
    vf first, second;
} pair;
INLINE vf multiply_add(vf sum, pair x, pair w) { return sum + x.first * w.first + x.second * w.second; }
INLINE pair broadcast_pair(const ELEMENT *x) { return (pair){splat(SCALAR(x[0])), splat(SCALAR(x[1]))}; }
INLINE pair split_words(vi low_halves, vi high_halves) {
    return (pair){__builtin_convertvector(low_halves, vf), __builtin_convertvector(high_halves, vf)};
}
INLINE pair load_dense(const ELEMENT *w) {
#if WIDTH == 2
    vu words;
    memcpy(&words, w, sizeof words);
    return (pair){(vf)(words << 16), (vf)(words & 0xffff0000)};
#else
    return (pair){load_f32(w, LANES), load_f32(w + LANES, LANES)};
#endif
}
#define INT4_BIAS 0.0f
INLINE pair unpack_int4(const uint8_t *w, int quarter) {
    vu words;
    memcpy(&words, w, sizeof words);
    return split_words((vi)(words >> (4 * quarter) & 15), (vi)(words >> (16 + 4 * quarter) & 15));
}
INLINE pair unpack_int8(const int8_t *w) {
    vh words;
    memcpy(&words, w, sizeof words);
    vi wide = (vi)__builtin_convertvector(words, vu) << 16;
    return split_words(wide << 8 >> 24, wide >> 24);
}
#endif
