// What the tests see of sampling: its exponential function, and the logits that it changes.
#include "sampling/adjust.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace tandem;

// A multiple of 8 numbers.
EXPORT void powers(const double* from, double* to, int64_t size) {
    for (int64_t at = 0; at < size; at += kDoubles) store(to + at, weights(load(from + at)));
}

// `logits` has room for a multiple of 32 numbers.
EXPORT void adjusted(float* logits, int64_t vocab, const SamplingParameters* row, int32_t* counts) {
    adjust(logits, vocab, *row, counts);
}
