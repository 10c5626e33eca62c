// The draw of a token: a uniform number that belongs to the row, and where it falls among weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "adjust.h"
#include "candidates.h"

namespace tandem::drawing {

// The finaliser of SplitMix64; uniform.py names its source.
inline uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

// The multiple of 2^-53 in [0, 1) that belongs to a row.
inline double uniform(const SamplingParameters& row) {
    uint64_t state = 0;
    for (const uint64_t key : {row.seed, row.choice, row.position}) state = mix(state + key + 0x9e3779b97f4a7c15u);
    return static_cast<double>(state >> 11) * 0x1p-53;
}

// Where a draw falls among weights of this sum: rounding may lift the product to the sum, which no token exceeds.
inline double target(const SamplingParameters& row, double total) {
    return std::min(uniform(row) * total, std::nextafter(total, 0.0));
}

// Draw one of the candidates, whose weights have this sum.
inline int64_t from_candidates(const std::vector<Candidate>& all, double total, const SamplingParameters& row) {
    const double wanted = target(row, total);
    double before = 0.0;
    size_t drawn = 0;
    while ((before += all[drawn].weight) <= wanted && drawn + 1 < all.size()) ++drawn;
    return all[drawn].id();
}

// Draw from the whole vocabulary: find the block by the sums of all, then the token within it. `weights_of(index)`
// gives the weights of one block.
template <typename WeightsOf>
int64_t from_blocks(const std::vector<double>& sums, const SamplingParameters& row, WeightsOf&& weights_of) {
    double total = 0.0;
    for (const double sum : sums) total += sum;
    const double wanted = target(row, total);
    double before = 0.0;
    size_t index = 0;
    while (before + sums[index] <= wanted && index + 1 < sums.size()) before += sums[index++];
    const double* weights = weights_of(static_cast<int64_t>(index));
    int64_t last = 0;  // that has a weight: rounding may let the sum of the block end below what is wanted
    for (int64_t place = 0; place < kBlock; ++place) {
        if (weights[place] > 0.0) last = place;
        if ((before += weights[place]) > wanted) break;
    }
    return static_cast<int64_t>(index) * kBlock + last;
}

}  // namespace tandem::drawing
