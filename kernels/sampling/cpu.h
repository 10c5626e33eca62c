// Choice of one row's next token. It depends on nothing but the row's logits and parameters.
#pragma once

#include "wide_nucleus.h"

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
    WideNucleus wide_nucleus;
};

namespace sampling {

// Draw by temperature alone.
inline int64_t draw_any(const Logits& logits, const Weigher& weigher, const SamplingParameters& row,
                        std::vector<double>& sums) {
    sums.resize(static_cast<size_t>(logits.num_blocks()));
    for (int64_t index = 0; index < logits.num_blocks(); ++index) {
        sums[static_cast<size_t>(index)] = weigher.block_sum(logits, index);
    }
    double weights[kBlock];
    return drawing::from_blocks(sums, row, [&](int64_t index) {
        weigher.weigh_block(logits.block(index), weights);
        return weights;
    });
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
        if (!candidates.take_mass(logits, weigher, row.top_p * mass)) {
            return memory.wide_nucleus.draw(logits, weigher, mass, row, candidates);
        }
    } else if (row.min_p > 1e-25) {  // below that it takes nothing that could be drawn
        candidates.take_likely(logits, weigher, row.min_p);
    } else {
        return draw_any(logits, weigher, row, memory.sums);
    }
    const uint64_t border = has_top_p ? candidates.border_of_mass(row.top_p * mass) : 0;
    const double kept = candidates.keep(border, row.min_p);
    return drawing::from_candidates(candidates.all(), kept, row);
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

// Return the token of one row of `logits` [vocab], `kInvalid` or `kViolated`. A greedy row takes the lowest of equal
// ids.
inline int64_t choose_token(const float* logits, int64_t vocab, const SamplingParameters& row, SamplingMemory& memory) {
    const Logits raw(logits, vocab, memory.maxima);
    if (!std::isfinite(raw.best())) return kInvalid;
    if (!row.is_adjusted()) return sampling::choose(raw, row, memory);
    const Logits changed(sampling::adjusted(logits, vocab, row, memory), vocab, memory.maxima);
    if (!std::isfinite(changed.best())) return kViolated;
    return sampling::choose(changed, row, memory);
}

// Return the logprob of `token`; write ids and logprobs of the likeliest `num_top` <= vocab. NaN if the greatest logit
// is not finite.
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
