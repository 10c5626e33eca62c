// Keys and values of a tile in the form that vectors want: keys by column, values by row.
#pragma once

#include "../native/part.h"
#include "ahead.h"
#include "plan.h"

namespace tandem {

// What products are computed with: pairs of bfloat16 where there is an instruction for them, else floats. A dword is a
// float or a pair.
template <typename T>
struct Form {
    using Number = float;
    static constexpr int64_t kPack = 1;

    static TANDEM_INLINE Floats load_numbers(const float* from) { return load(from); }
    static TANDEM_INLINE Floats broadcast_number(const float* from) { return broadcast(*from); }
    static TANDEM_INLINE Floats add_products(Floats acc, Floats a, Floats b) { return fma(a, b, acc); }

    // kLanes dwords of a row, or the first `count`.
    static TANDEM_INLINE Floats load_dwords(const T* from) { return load(from); }
    static TANDEM_INLINE Floats load_dwords(const T* from, int64_t count) { return load_part(from, count); }
};

#ifdef __AVX512BF16__
template <>
struct Form<bfloat16> {
    using Number = bfloat16;
    static constexpr int64_t kPack = 2;

    static TANDEM_INLINE Pairs load_numbers(const bfloat16* from) { return load_pairs(from); }
    static TANDEM_INLINE Pairs broadcast_number(const bfloat16* from) { return broadcast_pair(from); }
    static TANDEM_INLINE Floats add_products(Floats acc, Pairs a, Pairs b) { return dot_pairs(acc, a, b); }

    static TANDEM_INLINE Floats load_dwords(const bfloat16* from) { return {_mm512_loadu_ps(from)}; }
    static TANDEM_INLINE Floats load_dwords(const bfloat16* from, int64_t count) {
        return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)};
    }
};
#endif

#ifdef __AVX512F__

// rows[i] lane j becomes rows[j] lane i.
TANDEM_INLINE void transpose(Floats (&rows)[kLanes]) {
    __m512 quads[4][4];  // [rows 4 g ..][column c of every 128 bits]
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        const __m512 a = rows[4 * g].v, b = rows[4 * g + 1].v, c = rows[4 * g + 2].v, d = rows[4 * g + 3].v;
        const __m512d low_ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        const __m512d low_cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        const __m512d high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        const __m512d high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        quads[g][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_ab, low_cd));
        quads[g][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_ab, low_cd));
        quads[g][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd));
        quads[g][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 low_01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0x44);
        const __m512 low_23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0x44);
        const __m512 high_01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], 0xee);
        const __m512 high_23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], 0xee);
        rows[c].v = _mm512_shuffle_f32x4(low_01, low_23, 0x88);
        rows[4 + c].v = _mm512_shuffle_f32x4(low_01, low_23, 0xdd);
        rows[8 + c].v = _mm512_shuffle_f32x4(high_01, high_23, 0x88);
        rows[12 + c].v = _mm512_shuffle_f32x4(high_01, high_23, 0xdd);
    }
}

#else

// rows[i] lane j becomes rows[j] lane i.
TANDEM_INLINE void transpose(Floats (&rows)[kLanes]) {
    __m256 quads[2][4];  // [rows 4 g ..][column c of either 128 bits]
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
        const __m256 a = rows[4 * g].v, b = rows[4 * g + 1].v, c = rows[4 * g + 2].v, d = rows[4 * g + 3].v;
        const __m256d low_ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
        const __m256d low_cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
        const __m256d high_ab = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
        const __m256d high_cd = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
        quads[g][0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_ab, low_cd));
        quads[g][1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_ab, low_cd));
        quads[g][2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_ab, high_cd));
        quads[g][3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_ab, high_cd));
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        rows[c].v = _mm256_permute2f128_ps(quads[0][c], quads[1][c], 0x20);
        rows[4 + c].v = _mm256_permute2f128_ps(quads[0][c], quads[1][c], 0x31);
    }
}

#endif

// Keys of kLanes tokens [kLanes, head_dim] to `to` [head_dim / kPack dwords, kTileTokens], at their tokens' column. For
// four bytes that are read, one is fetched ahead; for values, too.
template <typename T>
TANDEM_INLINE void form_keys(const T* keys, int64_t head_dim, typename Form<T>::Number* to, Ahead& ahead) {
    constexpr int64_t kPack = Form<T>::kPack;
    const int64_t num_dwords = head_dim / kPack;
    float* dwords = reinterpret_cast<float*>(to);
    Floats block[kLanes];
    int64_t at = 0;
    for (; at + kLanes <= num_dwords; at += kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) block[i] = Form<T>::load_dwords(keys + i * head_dim + at * kPack);
        ahead.fetch(kLanes * kLanes * kPack * static_cast<int64_t>(sizeof(T)) / 4);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(dwords + (at + i) * kTileTokens, block[i]);
    }
    if (at == num_dwords) return;
    const int64_t count = num_dwords - at;
    for (int i = 0; i < kLanes; ++i) block[i] = Form<T>::load_dwords(keys + i * head_dim + at * kPack, count);
    transpose(block);
    for (int i = 0; i < count; ++i) store(dwords + (at + i) * kTileTokens, block[i]);
}

// Values of kLanes tokens [kLanes, head_dim] to `to` [kLanes / kPack, padded_dim dwords], zeros beyond head_dim.
template <typename T>
TANDEM_INLINE void form_values(const T* values, int64_t head_dim, int64_t padded_dim, typename Form<T>::Number* to,
                               Ahead& ahead) {
    constexpr int kRowsPerFetch = 4;
    const int64_t fetched_bytes = kRowsPerFetch * head_dim * static_cast<int64_t>(sizeof(T)) / 4;
    if constexpr (Form<T>::kPack == 1) {
        for (int i = 0; i < kLanes; ++i, values += head_dim, to += padded_dim) {
            if (i % kRowsPerFetch == 0) ahead.fetch(fetched_bytes);
            for_vectors(head_dim, [&](int64_t offset, auto lanes) { store(to + offset, lanes.load(values + offset)); });
            if (kLanes == 8 && padded_dim - head_dim >= kLanes) store(to + padded_dim - kLanes, zeros());
        }
    } else {
#ifdef __AVX512BF16__
        // Words 0, 32, 1, 33, ... of two registers: the first, then the second half of both interleaved.
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                             37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (int i = 0; i < kLanes; i += 2, values += 2 * head_dim, to += 2 * padded_dim) {
            if (i % kRowsPerFetch == 0) ahead.fetch(fetched_bytes);
            int64_t at = 0;
            for (; at + 32 <= head_dim; at += 32) {
                const __m512i even = _mm512_loadu_si512(values + at), odd = _mm512_loadu_si512(values + head_dim + at);
                _mm512_storeu_si512(to + 2 * at, _mm512_permutex2var_epi16(even, low, odd));
                _mm512_storeu_si512(to + 2 * at + 32, _mm512_permutex2var_epi16(even, high, odd));
            }
            if (at == head_dim) continue;
            const __mmask32 rest = (static_cast<__mmask32>(1) << (head_dim - at)) - 1;
            const __m512i even = _mm512_maskz_loadu_epi16(rest, values + at);
            const __m512i odd = _mm512_maskz_loadu_epi16(rest, values + head_dim + at);
            _mm512_storeu_si512(to + 2 * at, _mm512_permutex2var_epi16(even, low, odd));
            if (at + 16 < padded_dim) {
                _mm512_storeu_si512(to + 2 * at + 32, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
#endif
    }
}

}  // namespace tandem
