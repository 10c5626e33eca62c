// Vectors of the instruction set that this library is compiled for.
//
// A kernel is written once and compiled into one library per instruction set (compiler.py). Kernels of one set give the
// same result whatever the batch and the number of threads: every sum has one fixed order.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "bfloat16.h"

#define TANDEM_INLINE inline __attribute__((always_inline))

namespace tandem {

#ifdef __AVX512F__

constexpr int kLanes = 16;

struct Floats {
    __m512 v;
};

// kLanes pairs of bfloat16: pair i is numbers 2 i (low half) and 2 i + 1.
struct Pairs {
    __m512i v;
};

TANDEM_INLINE Floats zeros() { return {_mm512_setzero_ps()}; }
TANDEM_INLINE Floats broadcast(float value) { return {_mm512_set1_ps(value)}; }
TANDEM_INLINE Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
TANDEM_INLINE void store(float* to, Floats a) { _mm512_storeu_ps(to, a.v); }
TANDEM_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
TANDEM_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
TANDEM_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a b + c
TANDEM_INLINE float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
TANDEM_INLINE float maximum(Floats a) { return _mm512_reduce_max_ps(a.v); }

TANDEM_INLINE Floats load(const bfloat16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

TANDEM_INLINE void store(bfloat16* to, Floats a) {
#ifdef __AVX512BF16__
    const __m256i bits = (__m256i)_mm512_cvtneps_pbh(a.v);
#else
    const __m512i raw = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(raw, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    const __m512i quiet = _mm512_or_si512(raw, _mm512_set1_epi32(0x400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
    const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
}

TANDEM_INLINE Pairs load_pairs(const bfloat16* from) { return {_mm512_loadu_si512(from)}; }

// The same pair in every lane.
TANDEM_INLINE Pairs broadcast_pair(const bfloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return {_mm512_set1_epi32(pair)};
}

// acc[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1], products exact.
TANDEM_INLINE Floats dot_pairs(Floats acc, Pairs a, Pairs b) {
#ifdef __AVX512BF16__
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512 odd_a = _mm512_castsi512_ps(_mm512_and_si512(a.v, high));
    const __m512 odd_b = _mm512_castsi512_ps(_mm512_and_si512(b.v, high));
    const __m512 even_a = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
    const __m512 even_b = _mm512_castsi512_ps(_mm512_slli_epi32(b.v, 16));
    return {_mm512_fmadd_ps(even_a, even_b, _mm512_fmadd_ps(odd_a, odd_b, acc.v))};
#endif
}

#else  // AVX2 and FMA

constexpr int kLanes = 8;

struct Floats {
    __m256 v;
};

// kLanes pairs of bfloat16: pair i is numbers 2 i (low half) and 2 i + 1.
struct Pairs {
    __m256i v;
};

TANDEM_INLINE Floats zeros() { return {_mm256_setzero_ps()}; }
TANDEM_INLINE Floats broadcast(float value) { return {_mm256_set1_ps(value)}; }
TANDEM_INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
TANDEM_INLINE void store(float* to, Floats a) { _mm256_storeu_ps(to, a.v); }
TANDEM_INLINE Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
TANDEM_INLINE Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
TANDEM_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
TANDEM_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }  // a b + c

TANDEM_INLINE float sum(Floats a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

TANDEM_INLINE float maximum(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

TANDEM_INLINE Floats load(const bfloat16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}

TANDEM_INLINE void store(bfloat16* to, Floats a) {
    const __m256i raw = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(raw, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    const __m256i quiet = _mm256_or_si256(raw, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

TANDEM_INLINE Pairs load_pairs(const bfloat16* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))};
}

// The same pair in every lane.
TANDEM_INLINE Pairs broadcast_pair(const bfloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return {_mm256_set1_epi32(pair)};
}

// acc[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1], products exact.
TANDEM_INLINE Floats dot_pairs(Floats acc, Pairs a, Pairs b) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256 odd_a = _mm256_castsi256_ps(_mm256_and_si256(a.v, high));
    const __m256 odd_b = _mm256_castsi256_ps(_mm256_and_si256(b.v, high));
    const __m256 even_a = _mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16));
    const __m256 even_b = _mm256_castsi256_ps(_mm256_slli_epi32(b.v, 16));
    return {_mm256_fmadd_ps(even_a, even_b, _mm256_fmadd_ps(odd_a, odd_b, acc.v))};
}

#endif

TANDEM_INLINE void prefetch(const void* address) { _mm_prefetch(static_cast<const char*>(address), _MM_HINT_T0); }

}  // namespace tandem
