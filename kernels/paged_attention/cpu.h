// Paged attention of one task of a plan, within a phase of a step.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "block.h"
#include "plan.h"

namespace tandem {

// One layer's operands. Row r of `queries` has its num_heads * head_dim numbers at r * query_stride, of `outputs` at
// r * output_stride. `pages` are those of all layers.
template <typename T>
struct AttentionLayer {
    const T* queries;
    int64_t query_stride;
    const T* pages;
    int64_t layer;
    T* outputs;
    int64_t output_stride;
};

// Memory of one member of the team, reused by all its tasks.
template <typename T>
struct AttentionScratch {
    using Number = typename Form<T>::Number;

    Number* queries;  // [num_rows, head_dim]
    Number* keys;     // [head_dim / kPack dwords, kTileTokens]
    Number* values;   // [kTileTokens / kPack, padded_dim dwords]
    T* staged_keys;   // [kLanes, head_dim]
    T* staged_values;
    float* sums;      // [num_rows, kLanes]
    float* split;     // Partial of the split at hand
    float* folded;    // Partial of the splits before

    static int64_t bytes(const AttentionShape& shape) { return AttentionScratch(shape, nullptr).end_; }

    // `memory` is aligned to 64 bytes.
    AttentionScratch(const AttentionShape& shape, std::byte* memory) : memory_(memory) {
        const int64_t head_dim = shape.pages.head_dim, padded_dim = shape.padded_dim();
        const int64_t num_rows = tile_tokens(shape) * shape.group();
        queries = take<Number>(num_rows * head_dim);
        keys = take<Number>(kTileTokens * head_dim);
        values = take<Number>(kTileTokens * padded_dim);
        staged_keys = take<T>(kLanes * head_dim);
        staged_values = take<T>(kLanes * head_dim);
        sums = take<float>(num_rows * kLanes);
        split = take<float>(Partial::size(num_rows, padded_dim));
        folded = take<float>(Partial::size(num_rows, padded_dim));
    }

  private:
    template <typename Element>
    Element* take(int64_t count) {
        std::byte* const begin = memory_ + end_;
        end_ += (count * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
        return reinterpret_cast<Element*>(begin);
    }

    std::byte* memory_;
    int64_t end_ = 0;
};

// Brings a task's tiles from their pages into form. `following` is the task that the same member may do next, or null.
template <typename T>
class TileReader {
  public:
    TileReader(const AttentionShape& shape, const AttentionTask& task, const AttentionTask* following,
               const AttentionLayer<T>& operands, const AttentionScratch<T>& scratch)
        : pages_(shape.pages),
          padded_dim_(shape.padded_dim()),
          task_(task),
          following_(following),
          layer_(operands.pages + pages_.keys_at(0, operands.layer)),
          scratch_(scratch) {}

    TANDEM_INLINE void fetch_first() {
        aim(task_, task_.first_token());
        ahead_.fetch_all();
    }

    FormedTile<T> read(int64_t first) {
        constexpr int64_t kPack = Form<T>::kPack;
        if (first + kTileTokens < task_.last_token()) {
            aim(task_, first + kTileTokens);
        } else if (following_) {
            aim(*following_, following_->first_token());
        }
        const int64_t num_tokens = std::min(kTileTokens, task_.last_token() - first);
        for (int64_t at = 0; at < num_tokens; at += kLanes) {
            const T* const keys = group(first + at, std::min<int64_t>(kLanes, num_tokens - at));
            const T* const values = keys == scratch_.staged_keys ? scratch_.staged_values : keys + pages_.half_size();
            form_keys<T>(keys, pages_.head_dim, scratch_.keys + at * kPack, ahead_);
            form_values<T>(values, pages_.head_dim, padded_dim_, scratch_.values + at * padded_dim_, ahead_);
        }
        const float scale = kLog2OfE / std::sqrt(static_cast<float>(pages_.head_dim));
        return {scratch_.keys, scratch_.values, num_tokens, pages_.head_dim, padded_dim_, scale, &ahead_};
    }

    // What is left of the next tile.
    TANDEM_INLINE void fetch_rest() { ahead_.fetch_all(); }

  private:
    // The keys of a token; its values are half_size() behind.
    const T* key(const QueryTile& tile, int64_t token) const {
        const int64_t block = tile.table[token / pages_.block_size];
        return layer_ + block * pages_.block_stride() + tile.kv_head * pages_.head_size() +
               token % pages_.block_size * pages_.head_dim;
    }

    void aim(const AttentionTask& task, int64_t first) {
        const int64_t piece = std::min(pages_.block_size, kTileTokens);
        constexpr int64_t kNumberBytes = sizeof(T);
        ahead_.aim(piece * pages_.head_dim * kNumberBytes, pages_.half_size() * kNumberBytes);
        if (piece * Ahead::kMaxPieces < kTileTokens) return;  // too many pieces to be worth it
        const int64_t last = std::min(first + kTileTokens, task.last_token());
        for (int64_t token = first; token < last; token += piece) ahead_.add_piece(key(task.tile, token));
    }

    // The keys of kLanes tokens, `count` of them in the context: in their page, or staged, with zeros beyond `count`.
    const T* group(int64_t first, int64_t count) const {
        if (count == kLanes && pages_.block_size >= kLanes) return key(task_.tile, first);
        const size_t row_bytes = static_cast<size_t>(pages_.head_dim) * sizeof(T);
        for (int64_t i = 0; i < kLanes; ++i) {
            T* const staged_key = scratch_.staged_keys + i * pages_.head_dim;
            T* const staged_value = scratch_.staged_values + i * pages_.head_dim;
            if (i < count) {
                const T* const from = key(task_.tile, first + i);
                std::memcpy(staged_key, from, row_bytes);
                std::memcpy(staged_value, from + pages_.half_size(), row_bytes);
            } else {
                std::memset(staged_key, 0, row_bytes);
                std::memset(staged_value, 0, row_bytes);
            }
        }
        return scratch_.staged_keys;
    }

    const PageShape& pages_;
    const int64_t padded_dim_;
    const AttentionTask& task_;
    const AttentionTask* const following_;
    const T* const layer_;
    const AttentionScratch<T>& scratch_;
    Ahead ahead_;
};

// The queries of a tile's rows, by token, then head, one after another.
template <typename T>
inline void gather_queries(const AttentionShape& shape, const QueryTile& tile, const AttentionLayer<T>& operands,
                           typename Form<T>::Number* to) {
    const int64_t size = shape.group() * shape.pages.head_dim;
    const T* from = operands.queries + tile.first_row * operands.query_stride + tile.kv_head * size;
    for (int64_t token = 0; token < tile.num_tokens; ++token, from += operands.query_stride, to += size) {
        if constexpr (std::is_same_v<T, typename Form<T>::Number>) {
            std::memcpy(to, from, static_cast<size_t>(size) * sizeof(T));
        } else {
            for_vectors(size, [&](int64_t offset, auto lanes) { lanes.store(to + offset, lanes.load(from + offset)); });
        }
    }
}

// Nothing yet.
inline void clear(const Partial& partial, int64_t num_rows, int64_t padded_dim) {
    std::fill_n(partial.outputs, num_rows * padded_dim, 0.0f);
    std::fill_n(partial.maxima, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(partial.sums, num_rows, 0.0f);
}

// Compute one split for all rows of a tile.
template <typename T>
inline void attend_split(const AttentionShape& shape, const QueryTile& tile, int64_t split, TileReader<T>& reader,
                         const AttentionScratch<T>& scratch, const Partial& partial) {
    const int64_t group = shape.group(), num_rows = tile.num_tokens * group, padded_dim = shape.padded_dim();
    clear(partial, num_rows, padded_dim);
    std::fill_n(scratch.sums, num_rows * kLanes, 0.0f);
    const int64_t num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
    const int64_t end = std::min((split + 1) * kSplitTokens, tile.context());
    BlockScratch<T> block;
    for (int64_t first = split * kSplitTokens; first < end; first += kTileTokens) {
        const FormedTile<T> formed = reader.read(first);
        for (int64_t index = 0; index < num_blocks; ++index) {
            const int64_t row = num_rows * index / num_blocks, last = num_rows * (index + 1) / num_blocks;
            if (tile.position + (last - 1) / group < first) continue;  // all of the block's rows are before the tile
            BlockRows<T> rows{scratch.queries + row * shape.pages.head_dim,
                              partial.outputs + row * padded_dim,
                              partial.maxima + row,
                              scratch.sums + row * kLanes,
                              {}};
            for (int64_t r = row; r < last; ++r) rows.visible[r - row] = tile.position + r / group - first + 1;
            take_tile<T>(formed, rows, last - row, block);
        }
        reader.fetch_rest();
    }
    for (int64_t row = 0; row < num_rows; ++row) partial.sums[row] = sum(load(scratch.sums + row * kLanes));
}

// Take a later split into the earlier ones.
inline void fold(const Partial& later, int64_t num_rows, int64_t padded_dim, const Partial& all) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const float greatest = std::max(all.maxima[row], later.maxima[row]);
        const Floats old_weight = exp2(broadcast(all.maxima[row] - greatest));
        const Floats new_weight = exp2(broadcast(later.maxima[row] - greatest));
        float* const outputs = all.outputs + row * padded_dim;
        const float* const added = later.outputs + row * padded_dim;
        for (int64_t at = 0; at < padded_dim; at += kLanes) {
            store(outputs + at, fma(load(outputs + at), old_weight, load(added + at) * new_weight));
        }
        alignas(64) float sums[kLanes];
        store(sums, fma(broadcast(all.sums[row]), old_weight, broadcast(later.sums[row]) * new_weight));
        all.sums[row] = sums[0];
        all.maxima[row] = greatest;
    }
}

// Divide by the sums of weights and write the rows of a tile.
template <typename T>
inline void write_outputs(const AttentionShape& shape, const QueryTile& tile, const Partial& all, T* outputs,
                          int64_t output_stride) {
    const int64_t group = shape.group(), head_dim = shape.pages.head_dim, padded_dim = shape.padded_dim();
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
        const Floats scale = broadcast(1.0f / all.sums[row]);
        const float* const from = all.outputs + row * padded_dim;
        T* const to = outputs + (tile.first_row + row / group) * output_stride +
                      (tile.kv_head * group + row % group) * head_dim;
        for_vectors(head_dim, [&](int64_t offset, auto lanes) {
            lanes.store(to + offset, load(from + offset) * scale);
        });
    }
}

// Compute one of a plan's tasks; `scratch` has AttentionScratch<T>::bytes() at a multiple of 64.
template <typename T>
inline void attend(const AttentionPlan& plan, int64_t index, const AttentionLayer<T>& operands, std::byte* scratch) {
    const AttentionShape& shape = plan.shape;
    const AttentionTask& task = plan.tasks[static_cast<size_t>(index)];
    const int64_t num_rows = task.tile.num_tokens * shape.group(), padded_dim = shape.padded_dim();
    const AttentionScratch<T> memory(shape, scratch);
    const size_t following = static_cast<size_t>(index + plan.num_threads);  // members take turns, more or less
    const AttentionTask* const next = following < plan.tasks.size() ? &plan.tasks[following] : nullptr;
    TileReader<T> reader(shape, task, next, operands, memory);
    reader.fetch_first();
    gather_queries<T>(shape, task.tile, operands, memory.queries);
    if (task.partial) {
        const Partial partial(task.partial, num_rows, padded_dim);
        attend_split<T>(shape, task.tile, task.first_split, reader, memory, partial);
        return;
    }
    const Partial all(memory.folded, num_rows, padded_dim), split(memory.split, num_rows, padded_dim);
    attend_split<T>(shape, task.tile, 0, reader, memory, all);
    for (int64_t later = 1; later < task.last_split; ++later) {
        attend_split<T>(shape, task.tile, later, reader, memory, split);
        fold(split, num_rows, padded_dim, all);
    }
    write_outputs(shape, task.tile, all, operands.outputs, operands.output_stride);
}

// Fold the splits of one of a plan's tiles, when all tasks are done.
template <typename T>
inline void combine(const AttentionPlan& plan, int64_t index, const AttentionLayer<T>& operands) {
    const AttentionShape& shape = plan.shape;
    const AttentionCombine& task = plan.combines[static_cast<size_t>(index)];
    const int64_t num_rows = task.tile.num_tokens * shape.group(), padded_dim = shape.padded_dim();
    const Partial first(task.partials, num_rows, padded_dim);
    for (int64_t split = 1; split < task.tile.num_splits(); ++split) {
        fold(Partial(task.partials + split * task.stride, num_rows, padded_dim), num_rows, padded_dim, first);
    }
    write_outputs(shape, task.tile, first, operands.outputs, operands.output_stride);
}

}  // namespace tandem
