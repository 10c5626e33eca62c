#include "decoder.h"

namespace tandem {

namespace {

constexpr int kPhasesPerLayer = 9;
constexpr int kOtherPhases = 2;  // the embedding, the rows that are wanted

}  // namespace

template <typename T>
Decoder<T>::Decoder(const DecoderParameters& parameters, int num_threads, const std::vector<BorrowedCore>& borrowed)
    : hidden_size_(parameters.hidden_size),
      num_heads_(parameters.num_heads),
      num_kv_heads_(parameters.num_kv_heads),
      head_dim_(parameters.head_dim),
      vocab_size_(parameters.vocab_size),
      eps_(static_cast<float>(parameters.eps)),
      embedding_(static_cast<const T*>(parameters.embedding)),
      norm_(static_cast<const T*>(parameters.norm)),
      head_(parameters.head.as<T>()),
      num_members_(num_threads + static_cast<int>(borrowed.size())),
      team_(num_threads, static_cast<int>(parameters.num_layers) * kPhasesPerLayer + kOtherPhases, borrowed) {
    for (int64_t index = 0; index < parameters.num_layers; ++index) {
        const LayerParameters& layer = parameters.layers[index];
        layers_.push_back({static_cast<const T*>(layer.attention_norm), layer.qkv.as<T>(), layer.output.as<T>(),
                           static_cast<const T*>(layer.mlp_norm), layer.gate_up.as<T>(), layer.down.as<T>()});
    }
}

template <typename T>
BatchError Decoder<T>::forward(const DecoderBatch& batch) {
    const BatchError error = check(batch, vocab_size_);
    if (error != BatchError::kNone) return error;
    team_.run([this, step = begin(batch)](Member& member) { run(member, *step); });
    return BatchError::kNone;
}

template <typename T>
void Decoder<T>::head(const void* hidden, int64_t num_rows, float* logits) {
    team_.run([=, this](Member& member) {
        multiply(member, head_, num_rows, static_cast<const T*>(hidden), WriteOutput<float>{logits, vocab_size_});
    });
}

template <typename T>
std::shared_ptr<const typename Decoder<T>::Step> Decoder<T>::begin(const DecoderBatch& batch) {
    const int64_t num_layers = static_cast<int64_t>(layers_.size());
    const AttentionShape shape{{num_layers, num_kv_heads_, batch.block_size, head_dim_}, num_heads_};
    const int64_t num_tokens = batch.num_tokens, num_wanted = batch.num_wanted;
    const int64_t attended_size = num_heads_ * head_dim_, qkv_size = attended_size + 2 * num_kv_heads_ * head_dim_;
    const int64_t scratch_bytes = AttentionScratch<T>::bytes(shape);
    int64_t mlp_size = 0;
    for (const Layer& layer : layers_) mlp_size = std::max(mlp_size, layer.down.num_in);
    // Rows may be wanted twice.
    T* const normed = normed_.of<T>(std::max(num_tokens, num_wanted) * hidden_size_);
    T* const activated = activated_.of<T>(std::max(num_tokens, num_wanted) * mlp_size);
    return std::make_shared<const Step>(Step{
        .batch = batch,
        .attention = plan_attention(shape, batch.attention, num_members_),
        .all = {num_tokens, residual_.of<float>(num_tokens * hidden_size_), normed,
                attended_.of<T>(num_tokens * attended_size), activated},
        .wanted = {num_wanted, wanted_residual_.of<float>(num_wanted * hidden_size_), normed,
                   wanted_attended_.of<T>(num_wanted * attended_size), activated},
        .qkv = qkv_.of<T>(num_tokens * qkv_size),
        .scratch = scratch_.of<std::byte>(scratch_bytes * num_members_),
        .scratch_bytes = scratch_bytes,
    });
}

template <typename T>
void Decoder<T>::run(Member& member, const Step& step) const {
    embed(member, step);
    const int64_t last = static_cast<int64_t>(layers_.size()) - 1;
    for (int64_t index = 0; index <= last; ++index) {
        const Layer& layer = layers_[static_cast<size_t>(index)];
        multiply(member, layer.qkv, step.all.count, step.all.normed, WriteOutput<T>{step.qkv, layer.qkv.num_out});
        attend(member, step, index);
        if (index < last) {
            const T* const next_norm = layers_[static_cast<size_t>(index + 1)].attention_norm;
            finish_layer(member, layer, step.all, next_norm, step.all.normed);
        } else {  // nobody reads the other rows any more
            take_wanted(member, step);
            finish_layer(member, layer, step.wanted, norm_, static_cast<T*>(step.batch.hidden));
        }
    }
}

template <typename T>
void Decoder<T>::embed(Member& member, const Step& step) const {
    for_rows(member, step.all.count, [&](int64_t row) {
        float* const residual = step.all.residual + row * hidden_size_;
        embed_row(step.batch.token_ids[row], residual);
        rms_norm(residual, layers_[0].attention_norm, eps_, hidden_size_, step.all.normed + row * hidden_size_);
    });
}

template <typename T>
void Decoder<T>::embed_row(int64_t token, float* to) const {
    if (embedding_) {
        const T* const from = embedding_ + token * hidden_size_;
        for_vectors(hidden_size_, [&](int64_t at, auto lanes) { lanes.store(to + at, lanes.load(from + at)); });
        return;
    }
    constexpr int64_t kDepth = Line<T>::kDepth;
    const T* const from = head_.panels + token / kPanelColumns * head_.panel_size() + token % kPanelColumns * kDepth;
    for (int64_t at = 0; at < hidden_size_; ++at) {
        to[at] = to_float(from[at / kDepth * kPanelColumns * kDepth + at % kDepth]);
    }
}

// Write the layer's keys and values, and what the queries attend to.
template <typename T>
void Decoder<T>::attend(Member& member, const Step& step, int64_t layer) const {
    const DecoderBatch& batch = step.batch;
    const int64_t attended_size = num_heads_ * head_dim_, qkv_size = attended_size + 2 * num_kv_heads_ * head_dim_;
    T* const pages = static_cast<T*>(batch.pages);
    for_rows(member, batch.num_tokens, [&](int64_t row) {
        const int64_t angles = row * (head_dim_ / 2);
        rotary_kv_write(step.qkv + row * qkv_size, batch.cos + angles, batch.sin + angles, batch.slots[row], num_heads_,
                        step.attention.shape.pages, layer, pages);
    });
    const AttentionLayer<T> operands{step.qkv, qkv_size, pages, layer, step.all.attended, attended_size};
    member.phase(step.attention.num_tasks(), [&](int64_t task) {
        tandem::attend<T>(step.attention, task, operands, step.scratch + member.index() * step.scratch_bytes);
    });
    if (step.attention.num_combines()) {
        member.phase(step.attention.num_combines(),
                     [&](int64_t piece) { tandem::combine<T>(step.attention, piece, operands); });
    }
}

template <typename T>
void Decoder<T>::take_wanted(Member& member, const Step& step) const {
    const int64_t attended_size = num_heads_ * head_dim_;
    for_rows(member, step.wanted.count, [&](int64_t row) {
        const int64_t from = step.batch.wanted[row];
        std::copy_n(step.all.residual + from * hidden_size_, hidden_size_, step.wanted.residual + row * hidden_size_);
        std::copy_n(step.all.attended + from * attended_size, attended_size,
                    step.wanted.attended + row * attended_size);
    });
}

// All after attention: output projection and feed-forward block, each added to the residual, then the norm of what
// follows.
template <typename T>
void Decoder<T>::finish_layer(Member& member, const Layer& layer, const Rows& rows, const T* next_norm,
                              T* normed) const {
    const AddOutput add{rows.residual, hidden_size_};
    multiply(member, layer.output, rows.count, rows.attended, add);
    norm(member, rows, layer.mlp_norm, rows.normed);
    multiply(member, layer.gate_up, rows.count, rows.normed, WriteOutput<T>{rows.activated, layer.gate_up.num_out});
    multiply(member, layer.down, rows.count, rows.activated, add);
    norm(member, rows, next_norm, normed);
}

template <typename T>
void Decoder<T>::norm(Member& member, const Rows& rows, const T* weight, T* output) const {
    for_rows(member, rows.count, [&](int64_t row) {
        rms_norm(rows.residual + row * hidden_size_, weight, eps_, hidden_size_, output + row * hidden_size_);
    });
}

// A phase of `work(row)`, a few rows a piece.
template <typename T>
template <typename Work>
void Decoder<T>::for_rows(Member& member, int64_t count, const Work& work) const {
    const int64_t size = std::max<int64_t>(4, count / (4 * num_members_));
    member.phase((count + size - 1) / size, [&](int64_t piece) {
        const int64_t end = std::min(count, (piece + 1) * size);
        for (int64_t row = piece * size; row < end; ++row) work(row);
    });
}

template <typename T>
template <typename Write>
void Decoder<T>::multiply(Member& member, const PackedWeights<T>& weights, int64_t num_rows, const T* x,
                          const Write& write) const {
    const LinearPieces<T> pieces(weights, num_rows, num_members_);
    member.phase(pieces.count(), [&](int64_t piece) { pieces.run(piece, x, weights.num_in, write); });
}

template class Decoder<float>;
template class Decoder<bfloat16>;

}  // namespace tandem
