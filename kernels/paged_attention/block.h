// What is computed for a few rows (query token and head) with one tile: scores, weights, outputs.
#pragma once

#include <limits>
#include <type_traits>

#include "../native/exponential.h"
#include "form.h"

namespace tandem {

#ifdef __AVX512F__
constexpr int kBlockRows = 6, kStrip = 4;  // 24 of 32 registers accumulate
#else
constexpr int kBlockRows = 6, kStrip = 2;  // 12 of 16
#endif

// acc += a [R, steps dwords] times b [steps, V vectors of dwords], step after step; strides in dwords. Three bytes are
// fetched ahead for four of `b`, besides those that were while it came into form.
template <typename T, int R, int V>
TANDEM_INLINE void multiply(Floats (&acc)[R][V], const typename Form<T>::Number* a, int64_t a_stride,
                            const typename Form<T>::Number* b, int64_t b_stride, int64_t steps, Ahead& ahead) {
    constexpr int64_t kPack = Form<T>::kPack, kStepsPerFetch = 4, kVectorBytes = kLanes * 4;
    for (int64_t step = 0; step < steps; ++step) {
        if (step % kStepsPerFetch == 0) ahead.fetch(kStepsPerFetch * V * kVectorBytes * 3 / 4);
        decltype(Form<T>::load_numbers(b)) columns[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) columns[v] = Form<T>::load_numbers(b + (step * b_stride + v * kLanes) * kPack);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const auto row = Form<T>::broadcast_number(a + (r * a_stride + step) * kPack);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = Form<T>::add_products(acc[r][v], row, columns[v]);
        }
    }
}

// Call `work(first, width)` for strips of at most kStrip of `num_vectors`, about equally wide; `width` is a constant.
template <typename Work>
TANDEM_INLINE void for_strips(int64_t num_vectors, Work&& work) {
    int64_t num_strips = (num_vectors + kStrip - 1) / kStrip;
    for (int64_t first = 0; num_strips > 0; --num_strips) {
        const int64_t width = (num_vectors - first + num_strips - 1) / num_strips;
        switch (width) {
            case 1: work(first, std::integral_constant<int, 1>{}); break;
            case 2: work(first, std::integral_constant<int, 2>{}); break;
#if defined(__AVX512F__)
            case 3: work(first, std::integral_constant<int, 3>{}); break;
            case 4: work(first, std::integral_constant<int, 4>{}); break;
#endif
        }
        first += width;
    }
}

// One tile as a task's rows see it.
template <typename T>
struct FormedTile {
    const typename Form<T>::Number* keys;    // [head_dim / kPack dwords, kTileTokens]
    const typename Form<T>::Number* values;  // [kTileTokens / kPack, padded_dim dwords]
    int64_t num_tokens;                      // within the context
    int64_t head_dim;
    int64_t padded_dim;
    float scale;   // of scores, so that weights are powers of 2
    Ahead* ahead;  // of this tile
};

// Rows of a task from `queries` on; what is kept of each from tile to tile.
template <typename T>
struct BlockRows {
    const typename Form<T>::Number* queries;  // [R, head_dim]
    float* outputs;                           // [R, padded_dim]
    float* maxima;                            // [R]
    float* sums;                              // [R, kLanes]: of weights, by lane
    int64_t visible[kBlockRows];              // how many of the tile's tokens a row sees; may be below 1
};

template <typename T>
struct BlockScratch {
    alignas(64) float scores[kBlockRows][kTileTokens];
    alignas(64) typename Form<T>::Number weights[kBlockRows][kTileTokens];
    alignas(64) float maxima[kLanes] = {};
    alignas(64) float decays[kLanes] = {};
};

template <typename T, int R>
TANDEM_INLINE void score(const FormedTile<T>& tile, const BlockRows<T>& rows, BlockScratch<T>& scratch) {
    constexpr int64_t kPack = Form<T>::kPack;
    const int64_t num_dwords = tile.head_dim / kPack;
    for_strips((tile.num_tokens + kLanes - 1) / kLanes, [&](int64_t first, auto width) {
        constexpr int V = width;
        Floats acc[R][V];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) acc[r][v] = zeros();
        }
        multiply<T, R, V>(acc, rows.queries, num_dwords, tile.keys + first * kLanes * kPack, kTileTokens, num_dwords,
                          *tile.ahead);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                store(&scratch.scores[r][(first + v) * kLanes], acc[r][v] * broadcast(tile.scale));
            }
        }
    });
}

// Hide what a row does not see, and raise `maxima` to its greatest score; `decays` is what earlier weights become.
template <typename T, int R>
TANDEM_INLINE void raise_maxima(int64_t num_vectors, const BlockRows<T>& rows, BlockScratch<T>& scratch) {
    const Floats nothing = broadcast(-std::numeric_limits<float>::infinity());
    for (int r = 0; r < R; ++r) {
        Floats greatest = nothing;
        for (int64_t v = 0; v < num_vectors; ++v) {
            float* const scores = &scratch.scores[r][v * kLanes];
            Floats all = load(scores);
            const int64_t count = rows.visible[r] - v * kLanes;
            if (count < kLanes) {
                all = first_lanes(all, std::max<int64_t>(count, 0), nothing);
                store(scores, all);
            }
            greatest = max(greatest, all);
        }
        scratch.maxima[r] = std::max(rows.maxima[r], maximum(greatest));
        scratch.decays[r] = rows.maxima[r];
    }
    store(scratch.decays, exp2(load(scratch.decays) - load(scratch.maxima)));
}

// Scores to weights relative to the row's greatest score so far. A row that sees nothing of the tile stays as it is.
template <typename T, int R>
TANDEM_INLINE void weigh(const FormedTile<T>& tile, const BlockRows<T>& rows, BlockScratch<T>& scratch) {
    const int64_t num_vectors = (tile.num_tokens + kLanes - 1) / kLanes;
    raise_maxima<T, R>(num_vectors, rows, scratch);
    for (int r = 0; r < R; ++r) {
        if (rows.visible[r] < 1) {
            scratch.decays[r] = 1.0f;
            std::memset(scratch.weights[r], 0, sizeof(scratch.weights[r]));
            continue;
        }
        const Floats greatest = broadcast(scratch.maxima[r]);
        Floats total = load(rows.sums + r * kLanes) * broadcast(scratch.decays[r]);
        for (int64_t v = 0; v < num_vectors; ++v) {
            const Floats weights = exp2(load(&scratch.scores[r][v * kLanes]) - greatest);
            store(&scratch.weights[r][v * kLanes], weights);
            total = total + weights;
        }
        store(rows.sums + r * kLanes, total);
        rows.maxima[r] = scratch.maxima[r];
    }
}

template <typename T, int R>
TANDEM_INLINE void accumulate(const FormedTile<T>& tile, const BlockRows<T>& rows, const BlockScratch<T>& scratch) {
    constexpr int64_t kPack = Form<T>::kPack;
    for_strips(tile.padded_dim / kLanes, [&](int64_t first, auto width) {
        constexpr int V = width;
        Floats acc[R][V];
        float* const outputs = rows.outputs + first * kLanes;
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) {
                acc[r][v] = load(outputs + r * tile.padded_dim + v * kLanes) * broadcast(scratch.decays[r]);
            }
        }
        multiply<T, R, V>(acc, scratch.weights[0], kTileTokens / kPack, tile.values + first * kLanes * kPack,
                          tile.padded_dim, (tile.num_tokens + kPack - 1) / kPack, *tile.ahead);
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) store(outputs + r * tile.padded_dim + v * kLanes, acc[r][v]);
        }
    });
}

// Take a tile into `num_rows` (1 .. kBlockRows) rows.
template <typename T, int R = kBlockRows>
inline void take_tile(const FormedTile<T>& tile, const BlockRows<T>& rows, int64_t num_rows, BlockScratch<T>& scratch) {
    if constexpr (R > 1) {
        if (num_rows < R) return take_tile<T, R - 1>(tile, rows, num_rows, scratch);
    }
    score<T, R>(tile, rows, scratch);
    weigh<T, R>(tile, rows, scratch);
    accumulate<T, R>(tile, rows, scratch);
}

}  // namespace tandem
