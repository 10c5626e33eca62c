// How one step's attention is cut into tasks; equal for all layers.
//
// Keys are taken in tiles of kTileTokens from position 0, tiles in splits of kSplitTokens. Every row (query token and
// head) is computed split by split, each from nothing, and its splits are folded in order: so a row's result depends on
// nothing but the row and its context, whichever tasks do the work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "pages.h"

namespace tandem {

constexpr int64_t kTileTokens = 64;
constexpr int64_t kSplitTokens = 512;

struct AttentionShape {
    PageShape pages;
    int64_t num_heads;

    // Query heads per key-value head.
    int64_t group() const { return num_heads / pages.num_kv_heads; }
    // Numbers of a head in memory of our own: whole vectors of either instruction set.
    int64_t padded_dim() const { return (pages.head_dim + 15) / 16 * 16; }
};

// The chunks of a step: sequence i has `query_lengths[i]` tokens, the last of `context_lengths[i]`, whose keys and
// values are in the blocks of row i of `block_tables`. Query rows follow each other in this order. Length 0 is allowed.
struct AttentionBatch {
    int64_t num_sequences;
    const int64_t* query_lengths;
    const int64_t* context_lengths;
    const int64_t* block_tables;
    int64_t table_stride;
};

// Consecutive query tokens of one sequence, with the heads that share one key-value head.
struct QueryTile {
    const int64_t* table;
    int64_t first_row;   // of the batch
    int64_t num_tokens;
    int64_t position;    // of the first token
    int64_t kv_head;

    int64_t context() const { return position + num_tokens; }
    int64_t num_splits() const { return (context() + kSplitTokens - 1) / kSplitTokens; }
};

// Numbers, per row, that splits are folded from: the output before division, the greatest score, the sum of weights.
// Rows are ordered by token, then head.
struct Partial {
    float* outputs;   // [num_rows, padded_dim]
    float* maxima;    // [num_rows]
    float* sums;      // [num_rows]

    Partial(float* memory, int64_t num_rows, int64_t padded_dim)
        : outputs(memory), maxima(memory + num_rows * padded_dim), sums(maxima + num_rows) {}

    // In floats, a multiple of 64 bytes.
    static int64_t size(int64_t num_rows, int64_t padded_dim) { return (num_rows * (padded_dim + 2) + 15) / 16 * 16; }
};

// Splits [first_split, last_split) of a tile: all of them, or one whose result goes to `partial` to be combined later.
struct AttentionTask {
    QueryTile tile;
    int64_t first_split;
    int64_t last_split;
    float* partial;

    int64_t first_token() const { return first_split * kSplitTokens; }
    int64_t last_token() const { return std::min(last_split * kSplitTokens, tile.context()); }
};

// A tile whose splits are different tasks; `partials` are `stride` floats apart.
struct AttentionCombine {
    QueryTile tile;
    float* partials;
    int64_t stride;
};

// All tasks may run at once, then all combines.
struct AttentionPlan {
    AttentionShape shape;
    std::vector<AttentionTask> tasks;        // longest first
    std::vector<AttentionCombine> combines;
    std::unique_ptr<float[]> partials;
    int num_threads;

    int64_t num_tasks() const { return static_cast<int64_t>(tasks.size()); }
    int64_t num_combines() const { return static_cast<int64_t>(combines.size()); }
};

// `num_threads` decides how finely work is cut, not what comes out. The plan points into `batch`'s block tables.
AttentionPlan plan_attention(const AttentionShape& shape, const AttentionBatch& batch, int num_threads);

// Query tokens of the largest tile.
int64_t tile_tokens(const AttentionShape& shape);

}  // namespace tandem
