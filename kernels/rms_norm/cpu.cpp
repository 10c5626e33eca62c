#include "cpu.h"

#include "../native/entry.h"

namespace tandem {
namespace {

template <typename T>
void norm_rows(T* hidden, const T* delta, const T* weight, float eps, int64_t num_tokens, int64_t size, T* output) {
    for (int64_t token = 0; token < num_tokens; ++token) {
        const int64_t row = token * size;
        if (delta) {
            add_rms_norm(hidden + row, delta + row, weight, eps, size, output + row);
        } else {
            rms_norm(hidden + row, weight, eps, size, output + row);
        }
    }
}

}  // namespace
}  // namespace tandem

// Normalise the rows of `hidden` [num_tokens, size] after adding `delta` to them, in place, unless that is null.
TANDEM_ENTRY void tandem_rms_norm(int32_t dtype, void* hidden, const void* delta, const void* weight, float eps,
                                  int64_t num_tokens, int64_t size, void* output) {
    tandem::with_type(dtype, [&]<typename T>(T*) {
        tandem::norm_rows(static_cast<T*>(hidden), static_cast<const T*>(delta), static_cast<const T*>(weight), eps,
                          num_tokens, size, static_cast<T*>(output));
    });
}
