// Where keys and values are in the pages [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
#pragma once

#include <cstdint>

namespace tandem {

struct PageShape {
    int64_t num_layers;
    int64_t num_kv_heads;
    int64_t block_size;
    int64_t head_dim;

    // Numbers from one head's keys or values of a block to the next head's; all tokens of a head are contiguous.
    int64_t head_size() const { return block_size * head_dim; }
    // Numbers from a block's keys to its values, and from one block to the next.
    int64_t half_size() const { return num_kv_heads * head_size(); }
    int64_t block_stride() const { return num_layers * 2 * half_size(); }

    // The first number of the keys of `block` in `layer`.
    int64_t keys_at(int64_t block, int64_t layer) const { return block * block_stride() + layer * 2 * half_size(); }
};

}  // namespace tandem
