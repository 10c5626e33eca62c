#include "plan.h"

namespace tandem {

namespace {

// Rows of a tile: enough that bringing keys and values into the form of vectors is a small part of the work.
constexpr int64_t kTileRows = 96;

// Reading a token's keys and values takes as long as computing this many rows with them.
constexpr int64_t kReadRows = 6;

// What a task may cost at most, as a share of what each thread has to do, before its splits become tasks of their own.
constexpr int64_t kTasksPerThread = 4;

int64_t cost(const AttentionShape& shape, const QueryTile& tile) {
    return tile.context() * (kReadRows + tile.num_tokens * shape.group());
}

int64_t cost(const AttentionShape& shape, const AttentionTask& task) {
    const int64_t num_splits = task.tile.num_splits();
    return cost(shape, task.tile) * (task.last_split - task.first_split) / num_splits;
}

std::vector<QueryTile> cut_tiles(const AttentionShape& shape, const AttentionBatch& batch) {
    std::vector<QueryTile> tiles;
    const int64_t most = tile_tokens(shape);
    int64_t row = 0;
    for (int64_t sequence = 0; sequence < batch.num_sequences; ++sequence) {
        const int64_t* table = batch.block_tables + sequence * batch.table_stride;
        const int64_t length = batch.query_lengths[sequence];
        const int64_t start = batch.context_lengths[sequence] - length;
        for (int64_t first = 0; first < length; first += most) {
            const int64_t num_tokens = std::min(most, length - first);
            for (int64_t head = 0; head < shape.pages.num_kv_heads; ++head) {
                tiles.push_back({table, row + first, num_tokens, start + first, head});
            }
        }
        row += length;
    }
    return tiles;
}

}  // namespace

int64_t tile_tokens(const AttentionShape& shape) { return std::max<int64_t>(1, kTileRows / shape.group()); }

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionBatch& batch, int num_threads) {
    AttentionPlan plan{shape, {}, {}, nullptr, num_threads};
    const std::vector<QueryTile> tiles = cut_tiles(shape, batch);
    int64_t total = 0;
    for (const QueryTile& tile : tiles) total += cost(shape, tile);
    int64_t num_floats = 0;
    const auto is_cut = [&](const QueryTile& tile) {
        return num_threads > 1 && tile.num_splits() > 1 && cost(shape, tile) * num_threads * kTasksPerThread > total;
    };
    const auto stride = [&](const QueryTile& tile) {
        return Partial::size(tile.num_tokens * shape.group(), shape.padded_dim());
    };
    for (const QueryTile& tile : tiles) {
        if (is_cut(tile)) num_floats += tile.num_splits() * stride(tile);
    }
    if (num_floats) plan.partials.reset(new float[static_cast<size_t>(num_floats)]);
    float* partial = plan.partials.get();
    for (const QueryTile& tile : tiles) {
        if (!is_cut(tile)) {
            plan.tasks.push_back({tile, 0, tile.num_splits(), nullptr});
            continue;
        }
        plan.combines.push_back({tile, partial, stride(tile)});
        for (int64_t split = 0; split < tile.num_splits(); ++split, partial += stride(tile)) {
            plan.tasks.push_back({tile, split, split + 1, partial});
        }
    }
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [&](const AttentionTask& one, const AttentionTask& other) {
        return cost(shape, one) > cost(shape, other);
    });
    return plan;
}

}  // namespace tandem
