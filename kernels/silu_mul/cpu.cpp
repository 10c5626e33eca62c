#include "cpu.h"

#include "../native/entry.h"

// Write silu(gate) * up [num_tokens, size] for `gate_up` [num_tokens, 2 * size], gate first.
TANDEM_ENTRY void tandem_silu_mul(int32_t dtype, const void* gate_up, int64_t num_tokens, int64_t size, void* output) {
    tandem::with_type(dtype, [&]<typename T>(T*) {
        for (int64_t token = 0; token < num_tokens; ++token) {
            const T* gate = static_cast<const T*>(gate_up) + token * 2 * size;
            tandem::silu_mul(gate, gate + size, size, static_cast<T*>(output) + token * size);
        }
    });
}
