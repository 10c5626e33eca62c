// What the tests see of exponentials: each entry applies one to an array of a multiple of 16 numbers.
#include "native/exponential.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void power_of_2(const float* from, float* to, int64_t size) {
    for (int64_t at = 0; at < size; at += tandem::kLanes) tandem::store(to + at, tandem::exp2(tandem::load(from + at)));
}

EXPORT void power_of_e(const float* from, float* to, int64_t size) {
    for (int64_t at = 0; at < size; at += tandem::kLanes) tandem::store(to + at, tandem::exp(tandem::load(from + at)));
}
