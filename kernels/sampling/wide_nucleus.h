// Top-p where what it keeps is a large part of the vocabulary: nothing is ranked but the few tokens around its border.
#pragma once

#include "draw.h"

namespace tandem {

class WideNucleus {
  public:
    // Draw from the first ranks while those before them hold less than `row.top_p * mass`. `candidates` is memory.
    int64_t draw(const Logits& logits, const Weigher& weigher, double mass, const SamplingParameters& row,
                 Candidates& candidates) {
        const double wanted = row.top_p * mass;
        weigh_all(logits, weigher);
        const Bracket bracket = bracket_of(logits, weigher, wanted);
        candidates.take_between(logits, weigher, bracket.least, bracket.above);
        const uint64_t border = candidates.border_of_mass(wanted - bracket.before);
        const float least = Candidate::of_key(border).logit();
        for (const Candidate& each : candidates.all()) {
            if (each.key < border && each.logit() == least) weights_[static_cast<size_t>(each.id())] = 0.0;
        }
        keep(logits, least, std::min(row.min_p, 1.0));
        return drawing::from_blocks(sums_, row, [this](int64_t index) { return weights_.data() + index * kBlock; });
    }

  private:
    // The border is a logit in [least, above); what is not below `above` weighs `before`.
    struct Bracket {
        float least;
        float above;
        double before;
    };

    struct Share {
        double mass;
        double count;
    };

    // So few are cheaper to rank than to part once more.
    static constexpr double kFew = 128.0;

    void weigh_all(const Logits& logits, const Weigher& weigher) {
        weights_.resize(static_cast<size_t>(logits.num_blocks() * kBlock));
        for (int64_t index = 0; index < logits.num_blocks(); ++index) {
            double* result = weights_.data() + index * kBlock;
            if (weigher.is_negligible(logits.maximum(index))) {
                std::fill(result, result + kBlock, 0.0);
            } else {
                weigher.weigh_block(logits.block(index), result);
            }
        }
    }

    // Halve the range of logits. 64 halvings of a range of floats leave one float.
    Bracket bracket_of(const Logits& logits, const Weigher& weigher, double wanted) const {
        Bracket bracket{std::max(weigher.logit_of(Weigher::kNegligibleExponent), std::numeric_limits<float>::lowest()),
                        std::nextafter(logits.best(), kInfinity), 0.0};
        double num_within = static_cast<double>(logits.vocab());
        double num_above = 0.0;
        for (int step = 0; step < 64 && num_within > kFew; ++step) {
            const float middle = static_cast<float>(0.5 * bracket.least + 0.5 * bracket.above);
            if (!(bracket.least < middle && middle < bracket.above)) break;
            const Share share = at_least(logits, middle);
            if (share.mass >= wanted) {
                bracket.least = middle;
                num_within = share.count - num_above;
            } else {
                bracket.above = middle;
                bracket.before = share.mass;
                num_within -= share.count - num_above;
                num_above = share.count;
            }
        }
        return bracket;
    }

    // Mass and number of the tokens whose logit is >= threshold.
    Share at_least(const Logits& logits, float threshold) const {
        const Doubles bound = broadcast(static_cast<double>(threshold));
        const Doubles one = broadcast(1.0);
        Doubles mass[2] = {broadcast(0.0), broadcast(0.0)};
        Doubles count[2] = {broadcast(0.0), broadcast(0.0)};
        for (int64_t index = 0; index < logits.num_blocks(); ++index) {
            if (logits.maximum(index) < threshold) continue;
            const float* values = logits.block(index);
            const double* weights = weights_.data() + index * kBlock;
            for (int64_t first = 0; first < kBlock; first += 2 * kDoubles) {
                for (int64_t half = 0; half < 2; ++half) {
                    const Doubles each = load_doubles(values + first + half * kDoubles);
                    const Doubles weight = load(weights + first + half * kDoubles);
                    mass[half] = mass[half] + where_at_least(each, bound, weight);
                    count[half] = count[half] + where_at_least(each, bound, one);
                }
            }
        }
        return {sum(mass[0] + mass[1]), sum(count[0] + count[1])};
    }

    // Let what has a lower logit or weight weigh nothing; sum the rest per block.
    void keep(const Logits& logits, float least, double min_p) {
        sums_.resize(static_cast<size_t>(logits.num_blocks()));
        const Doubles bound = broadcast(static_cast<double>(least));
        const Doubles lightest = broadcast(min_p);
        for (int64_t index = 0; index < logits.num_blocks(); ++index) {
            double* weights = weights_.data() + index * kBlock;
            Doubles kept = broadcast(0.0);
            for (int64_t first = 0; first < kBlock; first += kDoubles) {
                const Doubles weight = load(weights + first);
                const Doubles likely = where_at_least(weight, lightest, weight);
                const Doubles each = where_at_least(load_doubles(logits.block(index) + first), bound, likely);
                store(weights + first, each);
                kept = kept + each;
            }
            sums_[static_cast<size_t>(index)] = sum(kept);
        }
    }

    std::vector<double> weights_;
    std::vector<double> sums_;
};

}  // namespace tandem
