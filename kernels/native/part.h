// Loads and stores of fewer than kLanes numbers: the end of a row that is no multiple of a vector.
#pragma once

#include "vector.h"

namespace tandem {

#ifdef __AVX512F__

// The first `count` lanes from memory, zeros beyond; nothing behind them is touched. 0 <= count <= kLanes.
TANDEM_INLINE Floats load_part(const float* from, int64_t count) {
    return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)};
}

TANDEM_INLINE Floats load_part(const bfloat16* from, int64_t count) {
    const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}

TANDEM_INLINE void store_part(float* to, Floats a, int64_t count) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), a.v);
}

TANDEM_INLINE void store_part(bfloat16* to, Floats a, int64_t count) {
    alignas(32) bfloat16 all[kLanes];
    store(all, a);
    const __m256i bits = _mm256_load_si256(reinterpret_cast<const __m256i*>(all));
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), bits);
}

// Lanes below `count` of `a`, `other` beyond.
TANDEM_INLINE Floats first_lanes(Floats a, int64_t count, Floats other) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), other.v, a.v)};
}

#else  // AVX2 and FMA

// All bits of lanes below `count`.
TANDEM_INLINE __m256i lanes_below(int64_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
}

// The first `count` lanes from memory, zeros beyond; nothing behind them is touched. 0 <= count <= kLanes.
TANDEM_INLINE Floats load_part(const float* from, int64_t count) {
    return {_mm256_maskload_ps(from, lanes_below(count))};
}

TANDEM_INLINE Floats load_part(const bfloat16* from, int64_t count) {
    bfloat16 all[kLanes] = {};
    std::memcpy(all, from, static_cast<size_t>(count) * sizeof(bfloat16));
    return load(all);
}

TANDEM_INLINE void store_part(float* to, Floats a, int64_t count) {
    _mm256_maskstore_ps(to, lanes_below(count), a.v);
}

TANDEM_INLINE void store_part(bfloat16* to, Floats a, int64_t count) {
    bfloat16 all[kLanes];
    store(all, a);
    std::memcpy(to, all, static_cast<size_t>(count) * sizeof(bfloat16));
}

// Lanes below `count` of `a`, `other` beyond.
TANDEM_INLINE Floats first_lanes(Floats a, int64_t count, Floats other) {
    return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(lanes_below(count)))};
}

#endif

// How the vectors of a row are read and written: `Whole` has all lanes, `Part` the first `count`.
struct Whole {
    template <typename T>
    TANDEM_INLINE Floats load(const T* from) const {
        return tandem::load(from);
    }
    template <typename T>
    TANDEM_INLINE void store(T* to, Floats a) const {
        tandem::store(to, a);
    }
};

struct Part {
    int64_t count;

    template <typename T>
    TANDEM_INLINE Floats load(const T* from) const {
        return load_part(from, count);
    }
    template <typename T>
    TANDEM_INLINE void store(T* to, Floats a) const {
        store_part(to, a, count);
    }
};

// Call `work(offset, lanes)` for all vectors of a row of `size` numbers, in order; `lanes` is Whole, at the end Part.
template <typename Work>
TANDEM_INLINE void for_vectors(int64_t size, Work&& work) {
    int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes) work(at, Whole{});
    if (at < size) work(at, Part{size - at});
}

}  // namespace tandem
