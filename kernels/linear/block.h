// The innermost loop: a few rows times a few panels over all of their length.
//
// Every output is one sum in one order, whatever the number of rows and panels: what a row gives does not depend on who
// is computed with it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lines.h"
#include "tiles.h"

namespace tandem {

constexpr int kMaxRegisterRows = 8;
constexpr int kMaxTiledRows = 32;
constexpr int kMaxRows = kMaxTiledRows;  // of a block
constexpr int kMaxPanels = 4;            // of a group
constexpr int kCacheLine = 64;
constexpr int kTileColumns = kMaxPanels * kPanelColumns;

#ifdef __AVX512F__
constexpr int kPanelsAtOnce = 4;
#else
constexpr int kPanelsAtOnce = 1;
#endif

// How many rows of `panels` panels have their sums, and what they are multiplied with, in registers.
template <typename T>
constexpr int max_register_rows(int panels) {
#if defined(__AVX512BF16__)
    return std::min(kMaxRegisterRows, 24 / panels);
#elif defined(__AVX512F__)
    // Without instructions for them, pairs are unpacked into twice as many registers.
    return std::min(kMaxRegisterRows, (Line<T>::kDepth == 1 ? 24 : 18) / panels);
#else
    static_cast<void>(panels);
    return Line<T>::kDepth == 1 ? 6 : 4;
#endif
}

#ifdef TANDEM_TILES

// Whether this machine has tiles, lets this process use them, and multiplies rightly with them.
bool has_tiles();

// While it lives, nothing else uses this thread's tiles.
class TileUse {
  public:
    TileUse();
    ~TileUse();
    TileUse(const TileUse&) = delete;
    TileUse& operator=(const TileUse&) = delete;
};

#else

inline bool has_tiles() { return false; }

struct TileUse {
    TileUse() {}  // something to declare a variable for
};

#endif

// The most rows of a block of `panels` panels.
template <typename T>
inline int max_rows(int panels) {
    return std::is_same_v<T, bfloat16> && has_tiles() ? kMaxTiledRows : max_register_rows<T>(panels);
}

// What is fetched from memory meanwhile: `rate` cache lines from `from` with each line that is multiplied.
struct WeightsAhead {
    const char* from = nullptr;
    int rate = 0;
};

// tile[r][c] = sum over k of x[r][k] w[k][c] for `rows` <= max_rows(panels) rows, `stride` apart, and a group of
// `panels` <= kMaxPanels panels, `panel_size` apart; rows of the tile are kTileColumns apart. Within a TileUse.
template <typename T>
void multiply_block(int rows, int panels, const T* x, int64_t stride, const T* first_panel, int64_t panel_size,
                    int64_t num_in, WeightsAhead ahead, float* tile);

}  // namespace tandem
