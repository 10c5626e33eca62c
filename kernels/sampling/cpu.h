// Choice of one row's next token. It depends on nothing but the row's logits and parameters.
#pragma once

#include "adjust.h"
#include "candidates.h"

namespace tandem {

// What a row has instead of a token; known to native.py.
constexpr int64_t kInvalid = -1;   // a logit is NaN or +inf, or all are -inf
constexpr int64_t kViolated = -2;  // the logits are good, but what the row demands leaves no token

// Memory of one thread, used again for every row.
struct SamplingMemory {
    std::vector<float> maxima;
    std::vector<float> logits;
    std::vector<int32_t> counts;
    std::vector<double> sums;
    Candidates candidates;
};

namespace sampling {

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
inline int64_t draw_one(const std::vector<Candidate>& all, double total, const SamplingParameters& row) {
    const double wanted = target(row, total);
    double before = 0.0;
    size_t drawn = 0;
    while ((before += all[drawn].weight) <= wanted && drawn + 1 < all.size()) ++drawn;
    return all[drawn].id();
}

// Draw from the whole vocabulary: find the block by the sums of all, then the token within it.
inline int64_t draw_any(const Logits& logits, const Weigher& weigher, const SamplingParameters& row,
                        std::vector<double>& sums) {
    sums.resize(static_cast<size_t>(logits.num_blocks()));
    double total = 0.0;
    for (int64_t index = 0; index < logits.num_blocks(); ++index) {
        total += sums[static_cast<size_t>(index)] = weigher.block_sum(logits, index);
    }
    const double wanted = target(row, total);
    double before = 0.0;
    int64_t index = 0;
    while (before + sums[static_cast<size_t>(index)] <= wanted) before += sums[static_cast<size_t>(index++)];
    double each[kBlock];
    weigher.weigh_block(logits.block(index), each);
    int64_t last = 0;  // that has a weight: rounding may let the sum of the block end below what is wanted
    for (int64_t place = 0; place < kBlock; ++place) {
        if (each[place] > 0.0) last = place;
        if ((before += each[place]) > wanted) break;
    }
    return index * kBlock + last;
}

inline int64_t draw(const Logits& logits, const SamplingParameters& row, SamplingMemory& memory) {
    const Weigher weigher(logits.best(), row.temperature);
    Candidates& candidates = memory.candidates;
    const bool has_top_p = row.top_p < 1.0;
    double mass = 1.0;
    if (0 < row.top_k && row.top_k < logits.vocab()) {
        candidates.take_best(logits, row.top_k);
        mass = candidates.weigh(weigher);
    } else if (has_top_p) {
        mass = weigher.mass(logits);
        candidates.take_mass(logits, weigher, row.top_p * mass, (1.0 - row.top_p) * mass);
    } else if (row.min_p > 1e-25) {  // below that it takes nothing that could be drawn
        candidates.take_likely(logits, weigher, row.min_p);
    } else {
        return draw_any(logits, weigher, row, memory.sums);
    }
    const uint64_t border = has_top_p ? candidates.border_of_mass(row.top_p * mass) : 0;
    const double kept = candidates.keep(border, row.min_p);
    return draw_one(candidates.all(), kept, row);
}

// A copy of a row's logits, changed as it demands; in blocks that are full.
inline float* adjusted(const float* logits, int64_t vocab, const SamplingParameters& row, SamplingMemory& memory) {
    memory.logits.resize(static_cast<size_t>((vocab + kBlock - 1) / kBlock * kBlock));
    memory.counts.resize(static_cast<size_t>(vocab));
    std::copy(logits, logits + vocab, memory.logits.begin());
    adjust(memory.logits.data(), vocab, row, memory.counts.data());
    return memory.logits.data();
}

inline int64_t choose(const Logits& logits, const SamplingParameters& row, SamplingMemory& memory) {
    return row.temperature > 0.0 ? draw(logits, row, memory) : logits.best_id();
}

}  // namespace sampling

// Return the token of one row of `logits` [vocab], `kInvalid` or `kViolated`. A greedy row takes the lowest of equal ids.
inline int64_t choose_token(const float* logits, int64_t vocab, const SamplingParameters& row, SamplingMemory& memory) {
    const Logits raw(logits, vocab, memory.maxima);
    if (!std::isfinite(raw.best())) return kInvalid;
    if (!row.is_adjusted()) return sampling::choose(raw, row, memory);
    const Logits changed(sampling::adjusted(logits, vocab, row, memory), vocab, memory.maxima);
    if (!std::isfinite(changed.best())) return kViolated;
    return sampling::choose(changed, row, memory);
}

// Return the logprob of `token`; write ids and logprobs of the likeliest `num_top` <= vocab. NaN if the greatest logit is not
// finite.
inline double token_logprob(const float* logits, int64_t vocab, int64_t token, int64_t num_top, int64_t* top_ids,
                            double* of_top, SamplingMemory& memory) {
    const Logits row(logits, vocab, memory.maxima);
    if (!std::isfinite(row.best())) {
        std::fill(top_ids, top_ids + num_top, 0);
        std::fill(of_top, of_top + num_top, std::numeric_limits<double>::quiet_NaN());
        return std::numeric_limits<double>::quiet_NaN();
    }
    const double log_sum = std::log(Weigher(row.best(), 1.0).mass(row));
    const auto logprob = [&](double logit) { return logit - row.best() - log_sum; };
    if (num_top) {
        const std::vector<Candidate>& top = memory.candidates.best(row, num_top);
        for (int64_t rank = 0; rank < num_top; ++rank) {
            top_ids[rank] = top[static_cast<size_t>(rank)].id();
            of_top[rank] = logprob(top[static_cast<size_t>(rank)].logit());
        }
    }
    return logprob(logits[token]);
}

}  // namespace tandem
