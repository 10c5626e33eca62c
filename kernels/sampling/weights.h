// Vectors of doubles, and the exponential function that makes weights of logits.
#pragma once

#include <limits>

#include "../native/vector.h"

namespace tandem {

#ifdef __AVX512F__

constexpr int kDoubles = 8;

struct Doubles {
    __m512d v;
};

TANDEM_INLINE Doubles broadcast(double value) { return {_mm512_set1_pd(value)}; }
TANDEM_INLINE Doubles load(const double* from) { return {_mm512_loadu_pd(from)}; }
TANDEM_INLINE Doubles load_doubles(const float* from) { return {_mm512_cvtps_pd(_mm256_loadu_ps(from))}; }
TANDEM_INLINE void store(double* to, Doubles a) { _mm512_storeu_pd(to, a.v); }
TANDEM_INLINE Doubles operator+(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles operator-(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles operator*(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }  // a b + c
TANDEM_INLINE Doubles max(Doubles a, Doubles b) { return {_mm512_max_pd(a.v, b.v)}; }  // b if a is NaN
TANDEM_INLINE double sum(Doubles a) { return _mm512_reduce_add_pd(a.v); }
TANDEM_INLINE Doubles nearest(Doubles a) { return {_mm512_roundscale_pd(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
TANDEM_INLINE Doubles times_power_of_2(Doubles a, Doubles power) { return {_mm512_scalef_pd(a.v, power.v)}; }

// `a` where x >= bound, 0 elsewhere.
TANDEM_INLINE Doubles where_at_least(Doubles x, Doubles bound, Doubles a) {
    return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x.v, bound.v, _CMP_GE_OQ), a.v)};
}

#else

constexpr int kDoubles = 4;

struct Doubles {
    __m256d v;
};

TANDEM_INLINE Doubles broadcast(double value) { return {_mm256_set1_pd(value)}; }
TANDEM_INLINE Doubles load(const double* from) { return {_mm256_loadu_pd(from)}; }
TANDEM_INLINE Doubles load_doubles(const float* from) { return {_mm256_cvtps_pd(_mm_loadu_ps(from))}; }
TANDEM_INLINE void store(double* to, Doubles a) { _mm256_storeu_pd(to, a.v); }
TANDEM_INLINE Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.v, b.v)}; }
TANDEM_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }  // a b + c
TANDEM_INLINE Doubles max(Doubles a, Doubles b) { return {_mm256_max_pd(a.v, b.v)}; }  // b if a is NaN
TANDEM_INLINE Doubles nearest(Doubles a) {
    return {_mm256_round_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

TANDEM_INLINE double sum(Doubles a) {
    const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

// For powers that a normal number can have.
TANDEM_INLINE Doubles times_power_of_2(Doubles a, Doubles power) {
    const __m256i exponent = _mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(power.v));
    const __m256i bits = _mm256_slli_epi64(_mm256_add_epi64(exponent, _mm256_set1_epi64x(1023)), 52);
    return {_mm256_mul_pd(a.v, _mm256_castsi256_pd(bits))};
}

// `a` where x >= bound, 0 elsewhere.
TANDEM_INLINE Doubles where_at_least(Doubles x, Doubles bound, Doubles a) {
    return {_mm256_and_pd(_mm256_cmp_pd(x.v, bound.v, _CMP_GE_OQ), a.v)};
}

#endif

// Below this a weight is 0 instead of a number of 300 zeros.
constexpr double kLowestExponent = -700.0;

// e^x of x <= 0, within 1 unit in the last place, and exactly 1 of 0; 0 below `kLowestExponent`.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 q(r), where q is the Chebyshev fit of degree 9 to the rest of
// the series: it adds an error of 1.3e-17 at most.
TANDEM_INLINE Doubles weights(Doubles x) {
    const Doubles lowest = broadcast(kLowestExponent);
    const Doubles inside = max(x, lowest);
    const Doubles n = nearest(inside * broadcast(0x1.71547652b82fep+0));
    const Doubles upper = fma(n, broadcast(-0x1.62e42fee00000p-1), inside);
    const Doubles r = fma(n, broadcast(-0x1.a39ef35793c76p-33), upper);
    Doubles q = broadcast(0x1.af38a9b0ec855p-26);
    q = fma(q, r, broadcast(0x1.289185613a3d6p-22));
    q = fma(q, r, broadcast(0x1.71de0dae63bb3p-19));
    q = fma(q, r, broadcast(0x1.a019b90d2ae7ap-16));
    q = fma(q, r, broadcast(0x1.a01a01a7c41d5p-13));
    q = fma(q, r, broadcast(0x1.6c16c1788bd90p-10));
    q = fma(q, r, broadcast(0x1.11111111109b3p-7));
    q = fma(q, r, broadcast(0x1.5555555553d63p-5));
    q = fma(q, r, broadcast(0x1.5555555555556p-3));
    q = fma(q, r, broadcast(0x1.0000000000001p-1));
    const Doubles power = fma(r * r, q, r) + broadcast(1.0);
    return where_at_least(x, lowest, times_power_of_2(power, n));
}

}  // namespace tandem
