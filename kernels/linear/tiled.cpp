#include "tiled.h"

#ifdef TANDEM_TILES

#include <algorithm>

namespace tandem {

namespace {

// Sums of two tiles of rows times two panels, then the rows, then the panels.
constexpr int kX = 4, kWeights = 6;
constexpr int64_t kStepLines = kTileRows;                 // of a panel
constexpr int64_t kStepDepth = 2 * kStepLines;            // numbers of a row
constexpr int64_t kStepSize = kStepLines * kPanelColumns * 2;  // numbers of a panel

// Rows of the two tiles of rows for which this thread's tiles are configured; -1 for none.
thread_local int configured[2] = {-1, -1};

void configure(int first_rows, int second_rows) {
    if (configured[0] == first_rows && configured[1] == second_rows) return;
    TileShapes shapes;
    for (const int tile : {0, 1, kX}) shapes.set(tile, first_rows);
    for (const int tile : {2, 3, kX + 1}) shapes.set(tile, second_rows);
    for (const int tile : {kWeights, kWeights + 1}) shapes.set(tile, kTileRows);
    configure_tiles(shapes);
    configured[0] = first_rows;
    configured[1] = second_rows;
}

// The end of rows whose length is no multiple of kStepDepth, and the lines that go with it, with zeros behind them.
struct Rest {
    alignas(64) bfloat16 x[kMaxTiledRows * kStepDepth] = {};
    alignas(64) bfloat16 weights[2 * kStepSize] = {};
};

template <bool kHasSecondRows, bool kHasSecondPanel>
TANDEM_INLINE void add_step(const bfloat16* x, int64_t stride, const bfloat16* panels, int64_t panel_size) {
    constexpr int64_t kNumber = sizeof(bfloat16);
    load_tile<kX>(x, stride * kNumber);
    load_tile<kWeights>(panels, kTileBytes);
    dot_tiles<0, kX, kWeights>();
    if constexpr (kHasSecondPanel) {
        load_tile<kWeights + 1>(panels + panel_size, kTileBytes);
        dot_tiles<1, kX, kWeights + 1>();
    }
    if constexpr (kHasSecondRows) {
        load_tile<kX + 1>(x + kTileRows * stride, stride * kNumber);
        dot_tiles<2, kX + 1, kWeights>();
        if constexpr (kHasSecondPanel) dot_tiles<3, kX + 1, kWeights + 1>();
    }
}

// One or two panels; `num_ahead` lines are fetched with every step.
template <bool kHasSecondRows, bool kHasSecondPanel>
void multiply_pair(int rows, const bfloat16* x, int64_t stride, const bfloat16* panels, int64_t panel_size,
                   int64_t num_in, const char* ahead, int num_ahead, float* tile) {
    clear_tile<0>();
    if constexpr (kHasSecondPanel) clear_tile<1>();
    if constexpr (kHasSecondRows) clear_tile<2>();
    if constexpr (kHasSecondRows && kHasSecondPanel) clear_tile<3>();
    const int64_t num_steps = num_in / kStepDepth;
    for (int64_t step = 0; step < num_steps; ++step) {
        for (int line = 0; line < num_ahead; ++line, ahead += kCacheLine) _mm_prefetch(ahead, _MM_HINT_T1);
        add_step<kHasSecondRows, kHasSecondPanel>(x + step * kStepDepth, stride, panels + step * kStepSize, panel_size);
    }
    if (const int64_t depth = num_in % kStepDepth) {
        Rest rest;
        for (int row = 0; row < rows; ++row) {
            std::copy_n(x + row * stride + num_steps * kStepDepth, depth, rest.x + row * kStepDepth);
        }
        const int64_t size = (depth + 1) / 2 * kPanelColumns * 2;
        for (int panel = 0; panel < (kHasSecondPanel ? 2 : 1); ++panel) {
            std::copy_n(panels + panel * panel_size + num_steps * kStepSize, size, rest.weights + panel * kStepSize);
        }
        add_step<kHasSecondRows, kHasSecondPanel>(rest.x, kStepDepth, rest.weights, kStepSize);
    }
    constexpr int64_t kRowBytes = kTileColumns * sizeof(float);
    store_tile<0>(tile, kRowBytes);
    if constexpr (kHasSecondPanel) store_tile<1>(tile + kPanelColumns, kRowBytes);
    if constexpr (kHasSecondRows) store_tile<2>(tile + kTileRows * kTileColumns, kRowBytes);
    if constexpr (kHasSecondRows && kHasSecondPanel) {
        store_tile<3>(tile + kTileRows * kTileColumns + kPanelColumns, kRowBytes);
    }
}

// Whether this machine multiplies as documented: whole numbers, whose sums are exact, of more than a tile each way.
bool multiplies_rightly() {
    constexpr int kRows = 19, kPanels = 3;
    constexpr int64_t kDepth = 70, kLines = kDepth / 2, kSize = kLines * kPanelColumns * 2;
    const auto x_at = [](int64_t row, int64_t k) { return static_cast<float>((row * 7 + k * 3) % 11 - 5); };
    const auto weight_at = [](int64_t k, int64_t column) { return static_cast<float>((k * 5 + column) % 13 - 6); };
    bfloat16 x[kRows * kDepth];
    alignas(64) bfloat16 panels[kPanels * kSize];
    for (int64_t at = 0; at < kRows * kDepth; ++at) x[at] = to_bfloat16(x_at(at / kDepth, at % kDepth));
    for (int64_t at = 0; at < kPanels * kSize; ++at) {
        const int64_t line = at % kSize / (2 * kPanelColumns);
        const int64_t column = at / kSize * kPanelColumns + at / 2 % kPanelColumns;
        panels[at] = to_bfloat16(weight_at(2 * line + at % 2, column));
    }
    alignas(64) float tile[kRows * kTileColumns];
    {
        const TileUse use;
        multiply_tiled(kRows, kPanels, x, kDepth, panels, kSize, kDepth, WeightsAhead(), tile);
    }
    for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t column = 0; column < kPanels * kPanelColumns; ++column) {
            float expected = 0.0f;
            for (int64_t k = 0; k < kDepth; ++k) expected += x_at(row, k) * weight_at(k, column);
            if (tile[row * kTileColumns + column] != expected) return false;
        }
    }
    return true;
}

}  // namespace

bool has_tiles() {
    static const bool has = may_use_tiles() && multiplies_rightly();
    return has;
}

TileUse::TileUse() { configured[0] = configured[1] = -1; }  // others configure the thread's tiles, too

TileUse::~TileUse() {
    if (configured[0] != -1) release_tiles();
}

void multiply_tiled(int rows, int panels, const bfloat16* x, int64_t stride, const bfloat16* first_panel,
                    int64_t panel_size, int64_t num_in, WeightsAhead ahead, float* tile) {
    configure(std::min(rows, kTileRows), std::max(rows - kTileRows, 0));
    const int num_pairs = (panels + 1) / 2;
    const int num_ahead = ahead.rate * static_cast<int>(kStepLines) / num_pairs;
    const int64_t bytes_ahead = num_in / kStepDepth * num_ahead * kCacheLine;
    for (int pair = 0; pair < num_pairs; ++pair) {
        const bfloat16* const from = first_panel + 2 * pair * panel_size;
        float* const to = tile + 2 * pair * kPanelColumns;
        const char* const next = ahead.from ? ahead.from + pair * bytes_ahead : nullptr;
        const auto multiply = [&]<bool kHasSecondRows, bool kHasSecondPanel>() {
            multiply_pair<kHasSecondRows, kHasSecondPanel>(rows, x, stride, from, panel_size, num_in, next, num_ahead,
                                                           to);
        };
        const bool has_second_panel = 2 * pair + 1 < panels;
        if (rows > kTileRows && has_second_panel) {
            multiply.template operator()<true, true>();
        } else if (rows > kTileRows) {
            multiply.template operator()<true, false>();
        } else if (has_second_panel) {
            multiply.template operator()<false, true>();
        } else {
            multiply.template operator()<false, false>();
        }
    }
}

}  // namespace tandem

#endif
