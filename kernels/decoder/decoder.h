// A Llama-like decoder: all layers of a step in one run of a team.
//
// Activations have the weights' type T, the residual stream is float: rounding it in every layer
// would lose much of what a layer adds. What a row gives depends on the row and its context alone.
#pragma once

#include <memory>
#include <vector>

#include "../linear/cpu.h"
#include "../native/memory.h"
#include "../native/team.h"
#include "../paged_attention/cpu.h"
#include "../rms_norm/cpu.h"
#include "../rotary/cpu.h"
#include "parameters.h"

namespace tandem {

class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    // One call at a time of either.
    virtual BatchError forward(const DecoderBatch& batch) = 0;
    virtual void head(const void* hidden, int64_t num_rows, float* logits) = 0;
};

template <typename T>
class Decoder final : public AnyDecoder {
  public:
    // Copies the structures; the tensors outlive the decoder.
    Decoder(const DecoderParameters& parameters, int num_threads, const std::vector<BorrowedCore>& borrowed);

    BatchError forward(const DecoderBatch& batch) override;
    void head(const void* hidden, int64_t num_rows, float* logits) override;

  private:
    struct Layer {
        const T* attention_norm;
        PackedWeights<T> qkv, output;
        const T* mlp_norm;
        PackedWeights<T> gate_up, down;
    };

    // Rows of activations, one after another.
    struct Rows {
        int64_t count;
        float* residual;  // [count, hidden_size]
        T* normed;        // [count, hidden_size]
        T* attended;      // [count, num_heads * head_dim]
        T* activated;     // [count, mlp_size]
    };

    // One step; shared with members that come late.
    struct Step {
        DecoderBatch batch;
        AttentionPlan attention;
        Rows all;
        Rows wanted;  // in the last layer, after attention
        T* qkv;       // [all.count, qkv_size]
        std::byte* scratch;
        int64_t scratch_bytes;  // per member
    };

    using Member = Team::Member;

    std::shared_ptr<const Step> begin(const DecoderBatch& batch);
    void run(Member& member, const Step& step) const;
    void embed(Member& member, const Step& step) const;
    void attend(Member& member, const Step& step, int64_t layer) const;
    void take_wanted(Member& member, const Step& step) const;
    void finish_layer(Member& member, const Layer& layer, const Rows& rows, const T* next_norm, T* normed) const;
    void norm(Member& member, const Rows& rows, const T* weight, T* output) const;
    void embed_row(int64_t token, float* to) const;

    template <typename Work>
    void for_rows(Member& member, int64_t count, const Work& work) const;
    template <typename Write>
    void multiply(Member& member, const PackedWeights<T>& weights, int64_t num_rows, const T* x,
                  const Write& write) const;

    const int64_t hidden_size_, num_heads_, num_kv_heads_, head_dim_, vocab_size_;
    const float eps_;
    const T* const embedding_;
    const T* const norm_;
    const PackedWeights<T> head_;
    std::vector<Layer> layers_;
    const int num_members_;
    Memory residual_, normed_, attended_, activated_, qkv_, scratch_, wanted_residual_, wanted_attended_;
    Team team_;  // ends first: its members may still look at the rest
};

}  // namespace tandem
