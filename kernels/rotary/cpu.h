// Rotary embedding of one token's heads, and the write of its keys and values into its slot.
#pragma once

#include "../native/part.h"
#include "../paged_attention/pages.h"

namespace tandem {

// Rotate one head of 2 * `half` numbers: element i is paired with element i + half. Rounded once, at the end.
// `to` may be `head`.
template <typename T>
TANDEM_INLINE void rotate(const T* head, const float* cos, const float* sin, int64_t half, T* to) {
    for_vectors(half, [&](int64_t offset, auto lanes) {
        const Floats first = lanes.load(head + offset), second = lanes.load(head + half + offset);
        const Floats cosine = lanes.load(cos + offset), sine = lanes.load(sin + offset);
        lanes.store(to + offset, first * cosine - second * sine);
        lanes.store(to + half + offset, second * cosine + first * sine);
    });
}

// One token: its queries are rotated in place, its rotated keys and its values go into `slot` of `pages`' `layer`.
// `qkv` has num_heads + 2 * num_kv_heads heads, q first, then k, then v; k and v stay as they are. `cos` and `sin` have
// head_dim / 2 numbers. Slot s is token s % block_size of block s / block_size.
template <typename T>
inline void rotary_kv_write(T* qkv, const float* cos, const float* sin, int64_t slot, int64_t num_heads,
                            const PageShape& shape, int64_t layer, T* pages) {
    const int64_t head_dim = shape.head_dim, half = head_dim / 2;
    for (T* query = qkv; query < qkv + num_heads * head_dim; query += head_dim) rotate(query, cos, sin, half, query);
    const T* keys = qkv + num_heads * head_dim;
    const T* values = keys + shape.num_kv_heads * head_dim;
    T* to = pages + shape.keys_at(slot / shape.block_size, layer) + slot % shape.block_size * head_dim;
    for (int64_t head = 0; head < shape.num_kv_heads; ++head, to += shape.head_size()) {
        rotate(keys + head * head_dim, cos, sin, half, to);
        std::memcpy(to + shape.half_size(), values + head * head_dim, static_cast<size_t>(head_dim) * sizeof(T));
    }
}

}  // namespace tandem
