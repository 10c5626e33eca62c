// What changes the logits of a row before a token is chosen: bias, penalties for earlier tokens, and what is forbidden.
// Numbers are rounded where torch rounds them. Ids outside the vocabulary change nothing.
#pragma once

#include "logits.h"

namespace tandem {

// Parameters of one row as native.py packs them: all members have 8 bytes, and arrays outlive the call.
struct SamplingParameters {
    double temperature;
    double top_p;
    double min_p;
    double presence_penalty;
    double frequency_penalty;
    double repetition_penalty;
    uint64_t seed;
    uint64_t choice;
    uint64_t position;
    int64_t top_k;
    const int64_t* bias_ids;
    const double* bias_addends;
    int64_t num_bias;
    const int64_t* held_back;  // ids that would end the sequence too early
    int64_t num_held_back;
    const int64_t* history;  // `num_prompt` ids of the prompt, then generated ones
    int64_t num_history;
    int64_t num_prompt;
    int64_t has_mask;
    const int32_t* allowed;  // token t may come if bit t % 32 of word t / 32 is set
    int64_t num_words;

    bool is_adjusted() const { return num_bias || num_held_back || num_history || has_mask; }
};

static_assert(sizeof(SamplingParameters) == 21 * 8);

namespace adjusting {

inline void penalise_repetition(float* logits, int64_t vocab, const SamplingParameters& row, int32_t* counts) {
    const float penalty = static_cast<float>(row.repetition_penalty);
    for (int64_t index = 0; index < row.num_history; ++index) {
        const int64_t id = row.history[index];
        if (id < 0 || id >= vocab || counts[id]++) continue;
        logits[id] = logits[id] < 0 ? logits[id] * penalty : logits[id] / penalty;
    }
    for (int64_t index = 0; index < row.num_history; ++index) {
        const int64_t id = row.history[index];
        if (id >= 0 && id < vocab) counts[id] = 0;
    }
}

inline void penalise_generated(float* logits, int64_t vocab, const SamplingParameters& row, int32_t* counts) {
    const float presence = static_cast<float>(row.presence_penalty);
    const float frequency = static_cast<float>(row.frequency_penalty);
    for (int64_t index = row.num_prompt; index < row.num_history; ++index) {
        const int64_t id = row.history[index];
        if (id >= 0 && id < vocab) ++counts[id];
    }
    for (int64_t index = row.num_prompt; index < row.num_history; ++index) {
        const int64_t id = row.history[index];
        if (id < 0 || id >= vocab || !counts[id]) continue;
        logits[id] -= presence + frequency * static_cast<float>(counts[id]);
        counts[id] = 0;
    }
}

// `logits` may be written up to a multiple of 32 numbers.
inline void forbid_others(float* logits, int64_t vocab, const int32_t* allowed, int64_t num_words) {
    const int64_t num_used = std::min(num_words, (vocab + 31) / 32);
    const Floats never = broadcast(-kInfinity);
    for (int64_t word = 0; word < num_used; ++word) {
        uint32_t bits = static_cast<uint32_t>(allowed[word]);
        for (int64_t id = word * 32; id < word * 32 + 32; id += kLanes, bits >>= kLanes) {
            store(logits + id, select(bits, load(logits + id), never));
        }
    }
    if (num_used * 32 < vocab) std::fill(logits + num_used * 32, logits + vocab, -kInfinity);
}

}  // namespace adjusting

// Change `logits` [vocab] in place; `counts` [vocab] is 0 before and after.
inline void adjust(float* logits, int64_t vocab, const SamplingParameters& row, int32_t* counts) {
    for (int64_t index = 0; index < row.num_bias; ++index) {
        const int64_t id = row.bias_ids[index];
        if (id >= 0 && id < vocab) logits[id] += static_cast<float>(row.bias_addends[index]);
    }
    if (row.repetition_penalty != 1.0) adjusting::penalise_repetition(logits, vocab, row, counts);
    if (row.presence_penalty != 0.0 || row.frequency_penalty != 0.0) {
        adjusting::penalise_generated(logits, vocab, row, counts);
    }
    for (int64_t index = 0; index < row.num_held_back; ++index) {
        const int64_t id = row.held_back[index];
        if (id >= 0 && id < vocab) logits[id] = -kInfinity;
    }
    if (row.has_mask) adjusting::forbid_others(logits, vocab, row.allowed, row.num_words);
}

}  // namespace tandem
