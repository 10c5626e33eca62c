// Exponentials of vectors.
#pragma once

#include "vector.h"

namespace tandem {

// 2^x within 2e-7 of its size, 1 for 0, 0 below -126.5 at the latest (so for -inf), infinity above 128.5 at the latest,
// NaN for NaN. 2^f for the fraction |f| <= 1/2 is a polynomial of degree 5 whose greatest relative error is least.
TANDEM_INLINE Floats exp2(Floats x) {
#ifdef __AVX512F__
    // The second operand is the result if one is NaN.
    const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(150.0f), _mm512_max_ps(_mm512_set1_ps(-150.0f), x.v));
    const __m512 whole = _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats fraction{_mm512_sub_ps(clamped, whole)};
#else
    const __m256 clamped = _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x.v));
    const __m256 whole = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats fraction{_mm256_sub_ps(clamped, whole)};
#endif
    Floats power = fma(broadcast(0x1.5bba14p-10f), fraction, broadcast(0x1.3cea88p-7f));
    power = fma(power, fraction, broadcast(0x1.c6b752p-5f));
    power = fma(power, fraction, broadcast(0x1.ebf9bcp-3f));
    power = fma(power, fraction, broadcast(0x1.62e42ap-1f));
    power = fma(power, fraction, broadcast(1.0f));
#ifdef __AVX512F__
    return {_mm512_scalef_ps(power.v, whole)};
#else
    // The exponent's bits: 0 for -127 is the number 0, 255 for 128 is infinity.
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return power * Floats{_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
#endif
}

constexpr float kLog2OfE = 0x1.715476p+0f;

// e^x within 1e-7 times (2 + |x|) of its size; 0 for -inf, infinity for inf, NaN for NaN.
TANDEM_INLINE Floats exp(Floats x) { return exp2(x * broadcast(kLog2OfE)); }

}  // namespace tandem
