// One row of logits in blocks: the maximum of each tells which blocks a later pass may leave out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "weights.h"

namespace tandem {

constexpr int64_t kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

#ifdef __AVX512F__

// Bit i tells of lane i: a >= b; a or b is NaN.
TANDEM_INLINE uint32_t at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
TANDEM_INLINE uint32_t unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q); }

// Lane i of a if bit i is set, else that of b.
TANDEM_INLINE Floats select(uint32_t bits, Floats a, Floats b) {
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.v, a.v)};
}

#else

TANDEM_INLINE uint32_t at_least(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
TANDEM_INLINE uint32_t unordered(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q)));
}

TANDEM_INLINE Floats select(uint32_t bits, Floats a, Floats b) {
    const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bits);
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lane_bits)))};
}

#endif

// Logits in order of token id, looked at block by block. They stay where they are; the last block is filled up with
// -inf.
class Logits {
  public:
    // `maxima` is memory for one number per block.
    Logits(const float* values, int64_t vocab, std::vector<float>& maxima)
        : values_(values), vocab_(vocab), num_full_(vocab / kBlock), maxima_(maxima) {
        std::fill(std::begin(tail_), std::end(tail_), -kInfinity);
        std::copy(values + num_full_ * kBlock, values + vocab, tail_);
        maxima_.resize(static_cast<size_t>(num_blocks()));
        find_maxima();
    }

    int64_t vocab() const { return vocab_; }
    int64_t num_blocks() const { return (vocab_ + kBlock - 1) / kBlock; }
    const float* block(int64_t index) const { return index < num_full_ ? values_ + index * kBlock : tail_; }
    float maximum(int64_t index) const { return maxima_[static_cast<size_t>(index)]; }
    const std::vector<float>& maxima() const { return maxima_; }

    int64_t num_blocks_at_least(float threshold) const {
        return std::count_if(maxima_.begin(), maxima_.end(), [=](float each) { return each >= threshold; });
    }

    // The greatest logit; NaN if any is NaN.
    float best() const { return best_; }

    // The lowest id that has the greatest logit, which is a number.
    int64_t best_id() const {
        const auto found = std::find(maxima_.begin(), maxima_.end(), best_);
        const int64_t index = found - maxima_.begin();
        return index * kBlock + (std::find(block(index), block(index) + kBlock, best_) - block(index));
    }

    // Call `visit(id, logit)` for every logit >= threshold, in order of id.
    template <typename Visit>
    void each_at_least(float threshold, Visit&& visit) const {
        for (int64_t index = 0; index < num_blocks(); ++index) {
            if (!(maximum(index) >= threshold)) continue;
            const float* values = block(index);
            for (int64_t first = 0; first < kBlock; first += kLanes) {
                uint32_t bits = at_least(load(values + first), broadcast(threshold));
                for (; bits; bits &= bits - 1) {
                    const int64_t place = first + __builtin_ctz(bits);
                    const int64_t id = index * kBlock + place;
                    if (id < vocab_) visit(id, values[place]);
                }
            }
        }
    }

  private:
    void find_maxima() {
        uint32_t bad = 0;
        float best = -kInfinity;
        for (int64_t index = 0; index < num_blocks(); ++index) {
            const float* values = block(index);
            Floats greatest = broadcast(-kInfinity);
            for (int64_t first = 0; first < kBlock; first += 2 * kLanes) {
                const Floats a = load(values + first);
                const Floats b = load(values + first + kLanes);
                bad |= unordered(a, b);
                greatest = max(greatest, max(a, b));
            }
            maxima_[static_cast<size_t>(index)] = tandem::maximum(greatest);
            best = std::max(best, maxima_[static_cast<size_t>(index)]);
        }
        best_ = bad ? std::numeric_limits<float>::quiet_NaN() : best;
    }

    const float* values_;
    int64_t vocab_;
    int64_t num_full_;
    std::vector<float>& maxima_;
    float best_;
    float tail_[kBlock];
};

}  // namespace tandem
