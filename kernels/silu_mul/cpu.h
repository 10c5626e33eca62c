// The gated activation of one row.
#pragma once

#include "../native/exponential.h"
#include "../native/part.h"

namespace tandem {

// gate / (1 + e^-gate) * up.
TANDEM_INLINE Floats silu_mul(Floats gate, Floats up) {
    return gate / (broadcast(1.0f) + exp(zeros() - gate)) * up;
}

// The same for `size` numbers; rounded once, at the end. `output` may be one of the inputs.
template <typename G, typename T>
inline void silu_mul(const G* gate, const G* up, int64_t size, T* output) {
    for_vectors(size, [&](int64_t offset, auto lanes) {
        lanes.store(output + offset, silu_mul(lanes.load(gate + offset), lanes.load(up + offset)));
    });
}

}  // namespace tandem
