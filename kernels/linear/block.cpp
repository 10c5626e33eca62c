#include "block.h"

#include <array>
#include <utility>

#include "tiled.h"

namespace tandem {

namespace {

template <typename T, int kRows, int kPanels>
class Block {
  public:
    static constexpr int kVectors = kPanels * kVectorsPerPanel;

    // tile[r][c] = sum over k of x[r][k] w[k][c]; rows of `x` are `stride` apart, those of the tile kTileColumns.
    static void multiply(const T* x, int64_t stride, const T* panels, int64_t panel_size, int64_t num_in,
                         WeightsAhead ahead, float* tile) {
        Block block(x, stride, panels, panel_size);
        const int64_t num_whole = num_in / Line<T>::kDepth;
        switch (ahead.rate) {
            case 0: block.template add_lines<0>(num_whole, nullptr); break;
            case 1: block.template add_lines<1>(num_whole, ahead.from); break;
            case 2: block.template add_lines<2>(num_whole, ahead.from); break;
            default: block.template add_lines<kMaxPanels>(num_whole, ahead.from);
        }
        if (num_in % Line<T>::kDepth) block.template add_line<true>(num_whole);
        for (int row = 0; row < kRows; ++row) {
            for (int vector = 0; vector < kVectors; ++vector) {
                store(tile + row * kTileColumns + vector * kLanes, block.sums_[row][vector]);
            }
        }
    }

  private:
    TANDEM_INLINE Block(const T* x, int64_t stride, const T* panels, int64_t panel_size)
        : x_(x), stride_(stride), panels_(panels), panel_size_(panel_size) {
        for (auto& row : sums_) {
            for (Floats& sum : row) sum = zeros();
        }
    }

    template <int kRate>
    TANDEM_INLINE void add_lines(int64_t num_lines, const char* ahead) {
        for (int64_t line = 0; line < num_lines; ++line) {
            for (int fetched = 0; fetched < kRate; ++fetched, ahead += kCacheLine) _mm_prefetch(ahead, _MM_HINT_T1);
            add_line<false>(line);
        }
    }

    template <bool kIsHalf>
    TANDEM_INLINE void add_line(int64_t line) {
        typename Line<T>::Vector weights[kVectors];
        for (int vector = 0; vector < kVectors; ++vector) {
            weights[vector] = Line<T>::weights(line_of(vector / kVectorsPerPanel, line), vector % kVectorsPerPanel);
        }
        for (int row = 0; row < kRows; ++row) {
            const T* const from = x_ + row * stride_ + line * Line<T>::kDepth;
            const auto x = kIsHalf ? Line<T>::last_activation(from) : Line<T>::activation(from);
            for (int vector = 0; vector < kVectors; ++vector) {
                sums_[row][vector] = Line<T>::multiply(sums_[row][vector], x, weights[vector]);
            }
        }
    }

    TANDEM_INLINE const T* line_of(int panel, int64_t line) const {
        return panels_ + panel * panel_size_ + line * (kPanelColumns * Line<T>::kDepth);
    }

    const T* const x_;
    const int64_t stride_;
    const T* const panels_;
    const int64_t panel_size_;
    Floats sums_[kRows][kVectors];
};

template <typename T>
using Multiply = void (*)(const T*, int64_t, const T*, int64_t, int64_t, WeightsAhead, float*);

template <typename T, int kPanels, int... kRowsLessOne>
constexpr auto blocks_of(std::integer_sequence<int, kRowsLessOne...>) {
    return std::array<Multiply<T>, sizeof...(kRowsLessOne)>{&Block<T, kRowsLessOne + 1, kPanels>::multiply...};
}

}  // namespace

template <typename T>
void multiply_block(int rows, int panels, const T* x, int64_t stride, const T* first_panel, int64_t panel_size,
                    int64_t num_in, WeightsAhead ahead, float* tile) {
#ifdef TANDEM_TILES
    if constexpr (std::is_same_v<T, bfloat16>) {
        if (has_tiles()) {
            return multiply_tiled(rows, panels, x, stride, first_panel, panel_size, num_in, ahead, tile);
        }
    }
#endif
    if (kPanelsAtOnce == 1) ahead.rate = std::min(ahead.rate, 1);
    const auto with = [&]<int kPanels>(const T* from, float* to) {
        using Rows = std::make_integer_sequence<int, max_register_rows<T>(kPanels)>;
        static constexpr auto kBlocks = blocks_of<T, kPanels>(Rows());
        kBlocks[static_cast<size_t>(rows - 1)](x, stride, from, panel_size, num_in, ahead, to);
    };
    if constexpr (kPanelsAtOnce == 1) {
        for (int panel = 0; panel < panels; ++panel) {
            with.template operator()<1>(first_panel + panel * panel_size, tile + panel * kPanelColumns);
            if (ahead.from) ahead.from += panel_size * static_cast<int64_t>(sizeof(T));
        }
    } else {
        switch (panels) {
            case 1: return with.template operator()<1>(first_panel, tile);
            case 2: return with.template operator()<2>(first_panel, tile);
            case 3: return with.template operator()<3>(first_panel, tile);
            default: return with.template operator()<4>(first_panel, tile);
        }
    }
}

template void multiply_block<float>(int, int, const float*, int64_t, const float*, int64_t, int64_t, WeightsAhead,
                                    float*);
template void multiply_block<bfloat16>(int, int, const bfloat16*, int64_t, const bfloat16*, int64_t, int64_t,
                                       WeightsAhead, float*);

}  // namespace tandem
