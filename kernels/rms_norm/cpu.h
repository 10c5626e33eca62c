// RMS normalisation of one row.
#pragma once

#include <cmath>

#include "../native/part.h"

namespace tandem {

// output = hidden / sqrt(mean(hidden^2) + eps) * weight, all `size` numbers; rounded once, at the end. The order of the
// sum of squares depends on the size alone. `output` may be `hidden`.
template <typename H, typename W, typename T>
inline void rms_norm(const H* hidden, const W* weight, float eps, int64_t size, T* output) {
    Floats squares[4] = {zeros(), zeros(), zeros(), zeros()};
    int64_t at = 0;
    for (; at + 4 * kLanes <= size; at += 4 * kLanes) {
        for (int part = 0; part < 4; ++part) {
            const Floats numbers = load(hidden + at + part * kLanes);
            squares[part] = fma(numbers, numbers, squares[part]);
        }
    }
    for_vectors(size - at, [&](int64_t offset, auto lanes) {
        const Floats numbers = lanes.load(hidden + at + offset);
        squares[0] = fma(numbers, numbers, squares[0]);
    });
    const float mean_square = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
    const Floats scale = broadcast(1.0f / std::sqrt(mean_square + eps));
    for_vectors(size, [&](int64_t offset, auto lanes) {
        lanes.store(output + offset, lanes.load(hidden + offset) * scale * lanes.load(weight + offset));
    });
}

// residual += delta, rounded to the residual's type; then `rms_norm` of the residual.
template <typename R, typename D, typename W, typename T>
inline void add_rms_norm(R* residual, const D* delta, const W* weight, float eps, int64_t size, T* output) {
    for_vectors(size, [&](int64_t offset, auto lanes) {
        lanes.store(residual + offset, lanes.load(residual + offset) + lanes.load(delta + offset));
    });
    rms_norm(residual, weight, eps, size, output);
}

}  // namespace tandem
