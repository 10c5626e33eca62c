// What Python passes: a model, once, and a batch, every step. `decoder.py` mirrors these structures.
#pragma once

#include <cstdint>

#include "../linear/lines.h"
#include "../paged_attention/plan.h"

namespace tandem {

// As PackedWeights, before the element type is known.
struct LinearParameters {
    const void* panels;
    const float* bias;
    int64_t num_out;
    int64_t num_in;
    int64_t is_gated;

    template <typename T>
    PackedWeights<T> as() const {
        return {static_cast<const T*>(panels), bias, num_out, num_in, is_gated != 0};
    }
};

struct LayerParameters {
    const void* attention_norm;  // [hidden_size]
    LinearParameters qkv;
    LinearParameters output;
    const void* mlp_norm;  // [hidden_size]
    LinearParameters gate_up;
    LinearParameters down;
};

struct DecoderParameters {
    int64_t hidden_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t vocab_size;
    double eps;
    const void* embedding;  // [vocab_size, hidden_size], or null: the rows of `head`
    int64_t num_layers;
    const LayerParameters* layers;
    const void* norm;  // [hidden_size]
    LinearParameters head;
};

struct DecoderBatch {
    int64_t num_tokens;
    const int64_t* token_ids;
    const float* cos;  // [num_tokens, head_dim / 2]
    const float* sin;
    const int64_t* slots;
    int64_t num_wanted;
    const int64_t* wanted;  // rows
    AttentionBatch attention;
    int64_t num_blocks;
    int64_t block_size;
    void* pages;  // [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    void* hidden;  // [num_wanted, hidden_size]
};

// Numbers of a batch that name nothing; what Python raises.
enum class BatchError : int32_t { kNone = 0, kToken = 1, kSlot = 2, kWanted = 3, kLengths = 4, kBlock = 5 };

BatchError check(const DecoderBatch& batch, int64_t vocab_size);

}  // namespace tandem
