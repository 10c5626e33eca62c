// x W^T for packed W, in pieces that members of a team claim; what is done with the sums is the caller's.
//
// A piece is some groups of panels for a chunk of rows. All rows of the chunk are multiplied with a group while that
// lies in the L2 cache, and the next group is fetched meanwhile: a step reads each weight once per chunk of rows.
#pragma once

#include <algorithm>

#include "../native/part.h"
#include "../silu_mul/cpu.h"
#include "block.h"

namespace tandem {

// What goes with one row of a tile: `write(row, column, count, sums)` gets `count` consecutive outputs, bias included.
//
// Writes them as `T`.
template <typename T>
struct WriteOutput {
    T* output;
    int64_t stride;

    TANDEM_INLINE void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
        T* const to = output + row * stride + column;
        for_vectors(count, [&](int64_t at, auto lanes) { lanes.store(to + at, lanes.load(sums + at)); });
    }
};

// Adds them to what is there.
struct AddOutput {
    float* output;
    int64_t stride;

    TANDEM_INLINE void operator()(int64_t row, int64_t column, int64_t count, const float* sums) const {
        float* const to = output + row * stride + column;
        for_vectors(count, [&](int64_t at, auto lanes) {
            lanes.store(to + at, lanes.load(to + at) + lanes.load(sums + at));
        });
    }
};

// Activations of a chunk stay in the L2 cache beside a group of panels.
constexpr int64_t kChunkBytes = 384 << 10;

template <typename T>
class LinearPieces {
  public:
    LinearPieces(const PackedWeights<T>& weights, int64_t num_rows, int num_threads)
        : weights_(weights), num_rows_(num_rows), num_threads_(num_threads) {
        const int64_t num_panels = weights.num_panels();
        group_ = weights.is_gated ? kMaxPanels : group_size(num_panels, num_threads);
        num_groups_ = (num_panels + group_ - 1) / group_;
        // Eight pieces per thread leave little to wait for at the end, if a piece is not too short to be worth a claim.
        groups_per_piece_ = std::max<int64_t>(1, num_groups_ / (8 * num_threads));
        pieces_per_chunk_ = (num_groups_ + groups_per_piece_ - 1) / groups_per_piece_;
        const int64_t row_bytes = weights.num_in * static_cast<int64_t>(sizeof(T));
        const int64_t fitting = std::max<int64_t>(kChunkBytes / row_bytes / 48 * 48, 48);
        const int64_t num_chunks = std::max<int64_t>(1, (num_rows + fitting - 1) / fitting);
        chunk_ = num_chunks == 1 ? num_rows : fitting;
        num_chunks_ = num_rows ? num_chunks : 0;
    }

    int64_t count() const { return num_chunks_ * pieces_per_chunk_; }

    // Compute one piece of x [num_rows, num_in], whose rows are `stride` apart, and pass its sums to `write`.
    template <typename Write>
    void run(int64_t piece, const T* x, int64_t stride, const Write& write) const {
        const TileUse tiles;
        const int64_t first_row = piece / pieces_per_chunk_ * chunk_;
        const int64_t num_rows = std::min(chunk_, num_rows_ - first_row);
        const int64_t first = piece % pieces_per_chunk_ * groups_per_piece_;
        const int64_t last = std::min(first + groups_per_piece_, num_groups_);
        for (int64_t group = first; group < last; ++group) {
            // Other members probably take the pieces in between.
            const int64_t next = group + 1 < last ? group + 1 : group + 1 + (num_threads_ - 1) * groups_per_piece_;
            run_group(group, std::min(next, num_groups_ - 1), x, stride, first_row, num_rows, write);
        }
    }

  private:
    // Four panels at once need the fewest loads, three the fewest members waiting at the end of some widths.
    static int64_t group_size(int64_t num_panels, int num_threads) {
        const auto longest = [&](int64_t size) {
            const int64_t num_groups = (num_panels + size - 1) / size;
            return (num_groups + num_threads - 1) / num_threads * size;
        };
        return longest(3) < longest(4) ? 3 : 4;
    }

    template <typename Write>
    void run_group(int64_t group, int64_t next, const T* x, int64_t stride, int64_t first_row, int64_t num_rows,
                   const Write& write) const {
        const int64_t first_panel = group * group_, panel_size = weights_.panel_size();
        const int panels = static_cast<int>(std::min(group_, weights_.num_panels() - first_panel));
        const int64_t most = max_rows<T>(panels), num_blocks = (num_rows + most - 1) / most;
        int64_t row = 0;
        for (int64_t block = 0; block < num_blocks; ++block) {
            // Equal blocks in registers; full ones in tiles, of which a started one costs as much as a full one.
            const int64_t equal = (num_rows - row + num_blocks - block - 1) / (num_blocks - block);
            const int rows = static_cast<int>(most == kMaxTiledRows ? std::min(most, num_rows - row) : equal);
            const WeightsAhead ahead = next > group ? fetched_by(block, num_blocks, next) : WeightsAhead{};
            alignas(64) float tile[kMaxRows * kTileColumns];
            multiply_block<T>(rows, panels, x + (first_row + row) * stride, stride,
                              weights_.panels + first_panel * panel_size, panel_size, weights_.num_in, ahead, tile);
            for (int at = 0; at < rows; ++at) {
                finish(first_row + row + at, first_panel, panels, tile + at * kTileColumns, write);
            }
            row += rows;
        }
    }

    // The blocks of a group fetch equal shares of the next one, evenly: memory is always read and never waited for.
    WeightsAhead fetched_by(int64_t block, int64_t num_blocks, int64_t next) const {
        const int64_t rate = (group_ + num_blocks - 1) / num_blocks;
        if (block * rate >= group_) return {};
        const T* const from = weights_.panels + (next * group_ + block * rate) * weights_.panel_size();
        return {reinterpret_cast<const char*>(from), static_cast<int>(rate)};
    }

    template <typename Write>
    TANDEM_INLINE void finish(int64_t row, int64_t first_panel, int panels, float* sums, const Write& write) const {
        if (weights_.bias) {
            const float* const bias = weights_.bias + first_panel * kPanelColumns;
            for (int at = 0; at < panels * kPanelColumns; at += kLanes) {
                store(sums + at, load(sums + at) + load(bias + at));
            }
        }
        int64_t columns = panels * kPanelColumns, column = first_panel * kPanelColumns;
        if (weights_.is_gated) {
            columns /= 2;
            column /= 2;
            for (int64_t at = 0; at < columns; at += kLanes) {
                const float* const gate = sums + at / kPanelColumns * 2 * kPanelColumns + at % kPanelColumns;
                store(sums + at, silu_mul(load(gate), load(gate + kPanelColumns)));
            }
        }
        write(row, column, std::min(columns, weights_.num_out - column), sums);
    }

    const PackedWeights<T> weights_;
    const int64_t num_rows_;
    const int num_threads_;
    int64_t group_, num_groups_, groups_per_piece_, pieces_per_chunk_, chunk_, num_chunks_;
};

}  // namespace tandem
