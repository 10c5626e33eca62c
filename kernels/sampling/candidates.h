// Which tokens of a row may be drawn and with what weight: temperature, then top-k, renormalise, top-p, min-p.
//
// Rank is by logit descending, then id ascending, and every filter keeps the first ranks: what is kept is all whose key
// is not below a border. So nothing needs to be sorted as a whole, and the kept ones are met in order of id.
#pragma once

#include <cstring>
#include <functional>
#include <iterator>

#include "logits.h"

namespace tandem {

// A token with its weight, which is proportional to its probability and 1 for the best one. The greater key is ranked
// first.
struct Candidate {
    uint64_t key;
    double weight;

    Candidate(int64_t id, float logit) : key(upper(logit) | static_cast<uint32_t>(~id)), weight(0.0) {}

    static Candidate of_key(uint64_t key) {
        Candidate result(0, 0.0f);
        result.key = key;
        return result;
    }

    int64_t id() const { return static_cast<uint32_t>(~key); }

    float logit() const {
        const uint32_t ordered = static_cast<uint32_t>(key >> 32);
        const uint32_t bits = ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
    }

  private:
    // The bits of a float, so that the greater one has the greater number; those of -0 are those of 0.
    static uint64_t upper(float logit) {
        const float value = logit + 0.0f;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        return static_cast<uint64_t>(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32;
    }
};

inline bool is_before(const Candidate& a, const Candidate& b) { return a.key > b.key; }

// Turns logits of one row into weights: e^((logit - best) / temperature).
class Weigher {
  public:
    // `best` is finite, `temperature` positive.
    Weigher(float best, double temperature)
        : best_(best),
          temperature_(temperature),
          inverse_(std::min(1.0 / temperature, std::numeric_limits<double>::max())) {}

    // The logit that has about the weight e^exponent.
    float logit_of(double exponent) const { return static_cast<float>(best_ + temperature_ * exponent); }

    // Weigh candidates; return their sum in the order in which they stand.
    double weigh(std::vector<Candidate>& candidates) const {
        double sum = 0.0;
        double exponents[kDoubles];
        for (size_t first = 0; first < candidates.size(); first += kDoubles) {
            const size_t count = std::min<size_t>(kDoubles, candidates.size() - first);
            for (size_t each = 0; each < kDoubles; ++each) {
                exponents[each] = each < count ? exponent(candidates[first + each].logit()) : 0.0;
            }
            store(exponents, weights(load(exponents)));
            for (size_t each = 0; each < count; ++each) sum += candidates[first + each].weight = exponents[each];
        }
        return sum;
    }

    // Write the weights of one block of logits.
    void weigh_block(const float* logits, double* result) const {
        for (int64_t first = 0; first < kBlock; first += kDoubles) store(result + first, of(logits + first));
    }

    // Whether tokens of this logit are too light to matter beside the best one, which weighs 1: 2^24 of them weigh
    // 3e-21, and a sum in doubles is known to 1e-16.
    bool is_negligible(float logit) const { return (logit - best_) * inverse_ < kNegligibleExponent; }

    // The sum of a block's weights, or 0 if it is negligible.
    double block_sum(const Logits& logits, int64_t index) const {
        if (is_negligible(logits.maximum(index))) return 0.0;
        const float* values = logits.block(index);
        Doubles even = broadcast(0.0);
        Doubles odd = broadcast(0.0);
        for (int64_t first = 0; first < kBlock; first += 2 * kDoubles) {
            even = even + of(values + first);
            odd = odd + of(values + first + kDoubles);
        }
        return sum(even + odd);
    }

    double mass(const Logits& logits) const {
        double total = 0.0;
        for (int64_t index = 0; index < logits.num_blocks(); ++index) total += block_sum(logits, index);
        return total;
    }

    static constexpr double kNegligibleExponent = -64.0;

  private:
    double exponent(float logit) const { return (static_cast<double>(logit) - best_) / temperature_; }

    // Multiplies where `exponent` divides: that costs 1e-16 of the exponent.
    Doubles of(const float* logits) const {
        return weights((load_doubles(logits) - broadcast(best_)) * broadcast(inverse_));
    }

    double best_;
    double temperature_;
    double inverse_;
};

// Candidates of one row, in order of id. The memory is used again for the next row.
class Candidates {
  public:
    const std::vector<Candidate>& all() const { return all_; }

    // Let those below the border or below `min_p` weigh nothing; return the sum of the others. The best one weighs 1.
    double keep(uint64_t border, double min_p) {
        const double least = std::min(min_p, 1.0);
        double sum = 0.0;
        for (Candidate& each : all_) {
            each.weight = (each.key >= border) & (each.weight >= least) ? each.weight : 0.0;
            sum += each.weight;
        }
        return sum;
    }

    // The `count` best tokens of a finite logit, or as many as there are.
    void take_best(const Logits& logits, int64_t count) {
        collect(logits, block_threshold(logits, count));
        if (static_cast<int64_t>(all_.size()) <= count) return;
        ranked_ = all_;
        const auto last = ranked_.begin() + (count - 1);
        std::nth_element(ranked_.begin(), last, ranked_.end(), is_before);
        const uint64_t border = last->key;
        std::erase_if(all_, [border](const Candidate& each) { return each.key < border; });
    }

    // Those that hold `mass` together, with some more; they are weighed. False if these are too many to be ranked.
    bool take_mass(const Logits& logits, const Weigher& weigher, double mass) {
        for (const double exponent : {-3.0, -7.0, -12.0}) {
            const float threshold = weigher.logit_of(exponent);
            if (logits.num_blocks_at_least(threshold) > kFewBlocks) return false;
            collect(logits, threshold);
            if (weigher.weigh(all_) >= mass) return true;
        }
        return false;
    }

    // All that have a logit in [least, above), weighed.
    void take_between(const Logits& logits, const Weigher& weigher, float least, float above) {
        all_.clear();
        logits.each_at_least(least, [&](int64_t id, float logit) {
            if (logit < above) all_.emplace_back(id, logit);
        });
        weigher.weigh(all_);
    }

    // All whose weight may be at least `min_p`.
    void take_likely(const Logits& logits, const Weigher& weigher, double min_p) {
        collect(logits, weigher.logit_of(std::log(std::min(min_p, 1.0)) - 1e-6));
        weigher.weigh(all_);
    }

    double weigh(const Weigher& weigher) { return weigher.weigh(all_); }

    // The key of the last rank that is kept while those before it hold less than `mass`; of the best one at least.
    uint64_t border_of_mass(double mass) {
        double before = rank_border(mass);
        auto first = ranked_.begin();
        auto last = ranked_.end();
        while (last - first > 32) {
            const auto middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, is_before);
            double upper = 0.0;
            for (auto each = first; each < middle; ++each) upper += each->weight;
            if (before + upper >= mass) {
                last = middle;
            } else {
                before += upper;
                first = middle;
            }
        }
        std::sort(first, last, is_before);
        auto kept = first;
        for (auto each = first; each < last && (each == first || before < mass); ++each) {
            before += each->weight;
            kept = each;
        }
        return kept->key;
    }

    // The `count` best tokens in rank order, whatever their logits are; `count` <= vocab.
    const std::vector<Candidate>& best(const Logits& logits, int64_t count) {
        ranked_.clear();
        logits.each_at_least(block_threshold(logits, count), [this](int64_t id, float logit) {
            ranked_.emplace_back(id, logit);
        });
        std::partial_sort(ranked_.begin(), ranked_.begin() + count, ranked_.end(), is_before);
        return ranked_;
    }

  private:
    static constexpr int64_t kFewBlocks = 96;
    static constexpr size_t kNumBins = 256;
    static constexpr size_t kWorthBinning = 512;

    // Put the ranks among which those before them come to hold `mass` into `ranked_`; return what is before these.
    //
    // Many candidates are put into bins of equal ranges of logits first, so that only one bin is left to rank.
    double rank_border(double mass) {
        if (all_.size() < kWorthBinning) {
            ranked_ = all_;
            return 0.0;
        }
        Candidate best = all_.front();
        Candidate worst = best;
        for (const Candidate& each : all_) {
            best.key = std::max(best.key, each.key);
            worst.key = std::min(worst.key, each.key);
        }
        const double top = best.logit();
        const double range = top - worst.logit();
        const double scale = range > 0.0 ? kNumBins / range : 0.0;
        const auto bin_of = [=](const Candidate& each) {
            return std::min(static_cast<size_t>((top - each.logit()) * scale), kNumBins - 1);
        };
        double sums[kNumBins] = {};
        for (const Candidate& each : all_) sums[bin_of(each)] += each.weight;
        double before = 0.0;
        size_t border = 0;
        const size_t last = bin_of(worst);  // all are kept if rounding lets the sum end below `mass`
        while (border < last && before + sums[border] < mass) before += sums[border++];
        ranked_.clear();
        std::copy_if(all_.begin(), all_.end(), std::back_inserter(ranked_),
                     [=](const Candidate& each) { return bin_of(each) == border; });
        return before;
    }

    void collect(const Logits& logits, float threshold) {
        all_.clear();
        const float lowest = std::max(threshold, std::numeric_limits<float>::lowest());
        logits.each_at_least(lowest, [this](int64_t id, float logit) { all_.emplace_back(id, logit); });
    }

    // At least `count` logits reach it: so many blocks have one that does.
    float block_threshold(const Logits& logits, int64_t count) {
        if (count > logits.num_blocks()) return -kInfinity;
        maxima_ = logits.maxima();
        const auto last = maxima_.begin() + (count - 1);
        std::nth_element(maxima_.begin(), last, maxima_.end(), std::greater<float>());
        return *last;
    }

    std::vector<Candidate> all_;
    std::vector<Candidate> ranked_;
    std::vector<float> maxima_;
};

}  // namespace tandem
