// Packed weights, and how one line of them is multiplied.
//
// Columns (outputs) come in panels of 16. A line is 64 bytes of a panel: one number of each column for float, two
// consecutive ones for bfloat16. A panel is its lines one after another: [num_panels][num_lines][16 columns][depth].
#pragma once

#include <cstdint>

#include "../native/vector.h"

namespace tandem {

constexpr int kPanelColumns = 16;
constexpr int kVectorsPerPanel = kPanelColumns / kLanes;

template <typename T>
struct Line;

template <>
struct Line<float> {
    static constexpr int kDepth = 1;
    using Vector = Floats;
    static TANDEM_INLINE Vector weights(const float* line, int vector) { return load(line + vector * kLanes); }
    static TANDEM_INLINE Vector activation(const float* x) { return broadcast(*x); }
    static TANDEM_INLINE Vector last_activation(const float* x) { return broadcast(*x); }
    static TANDEM_INLINE Floats multiply(Floats acc, Vector x, Vector weights) { return fma(x, weights, acc); }
};

template <>
struct Line<bfloat16> {
    static constexpr int kDepth = 2;
    using Vector = Pairs;
    static TANDEM_INLINE Vector weights(const bfloat16* line, int vector) {
        return load_pairs(line + 2 * vector * kLanes);
    }
    static TANDEM_INLINE Vector activation(const bfloat16* x) { return broadcast_pair(x); }
    // Of a row whose length is odd.
    static TANDEM_INLINE Vector last_activation(const bfloat16* x) {
        const bfloat16 pair[2] = {*x, {0}};
        return broadcast_pair(pair);
    }
    static TANDEM_INLINE Floats multiply(Floats acc, Vector x, Vector weights) { return dot_pairs(acc, x, weights); }
};

// `panels` as above; columns beyond `num_out` and numbers beyond `num_in` are zeros. If gated, panels alternate between
// 16 gates and the 16 numbers they gate, and `num_out` counts the products. `bias` has a number per column of a panel,
// or is null.
template <typename T>
struct PackedWeights {
    const T* panels;
    const float* bias;
    int64_t num_out;
    int64_t num_in;
    bool is_gated;

    int64_t num_lines() const { return (num_in + Line<T>::kDepth - 1) / Line<T>::kDepth; }
    int64_t panel_size() const { return num_lines() * kPanelColumns * Line<T>::kDepth; }
    int64_t num_panels() const { return (num_out + kPanelColumns - 1) / kPanelColumns * (is_gated ? 2 : 1); }
};

}  // namespace tandem
