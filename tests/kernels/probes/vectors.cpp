// What the tests see of the vectors: each entry applies one operation to arrays of a multiple of 16 numbers.
#include "native/vector.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace tandem;

EXPORT void narrow(const float* from, bfloat16* to, int64_t size) {
    for (int64_t at = 0; at < size; at += kLanes) store(to + at, load(from + at));
}

EXPORT void narrow_one_by_one(const float* from, bfloat16* to, int64_t size) {
    for (int64_t at = 0; at < size; ++at) to[at] = to_bfloat16(from[at]);
}

EXPORT void widen(const bfloat16* from, float* to, int64_t size) {
    for (int64_t at = 0; at < size; at += kLanes) store(to + at, load(from + at));
}

EXPORT void widen_one_by_one(const bfloat16* from, float* to, int64_t size) {
    for (int64_t at = 0; at < size; ++at) to[at] = to_float(from[at]);
}

EXPORT float total(const float* from, int64_t size) {
    Floats all = zeros();
    for (int64_t at = 0; at < size; at += kLanes) all = all + load(from + at);
    return sum(all);
}

EXPORT float greatest(const float* from, int64_t size) {
    Floats all = load(from);
    for (int64_t at = 0; at < size; at += kLanes) all = max(all, load(from + at));
    return maximum(all);
}

// to[i] += a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] for `size` pairs.
EXPORT void add_dots(float* to, const bfloat16* a, const bfloat16* b, int64_t size) {
    for (int64_t at = 0; at < size; at += kLanes) {
        store(to + at, dot_pairs(load(to + at), load_pairs(a + 2 * at), load_pairs(b + 2 * at)));
    }
}

EXPORT void add_dots_with_first(float* to, const bfloat16* a, const bfloat16* b, int64_t size) {
    for (int64_t at = 0; at < size; at += kLanes) {
        store(to + at, dot_pairs(load(to + at), broadcast_pair(a), load_pairs(b + 2 * at)));
    }
}
