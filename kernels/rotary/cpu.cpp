#include "cpu.h"

#include "../native/entry.h"

// Rotate and write `num_tokens` rows of `qkv` [num_tokens, num_heads + 2 * num_kv_heads, head_dim]. `cos`, `sin` are
// [num_tokens, head_dim / 2], `slots` [num_tokens], `page_shape` the last five sizes of the pages without the 2.
TANDEM_ENTRY void tandem_rotary_kv_write(int32_t dtype, void* qkv, const float* cos, const float* sin,
                                         const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                                         const tandem::PageShape* page_shape, int64_t layer, void* pages) {
    const int64_t head_dim = page_shape->head_dim;
    const int64_t row_size = (num_heads + 2 * page_shape->num_kv_heads) * head_dim;
    tandem::with_type(dtype, [&]<typename T>(T*) {
        for (int64_t token = 0; token < num_tokens; ++token) {
            tandem::rotary_kv_write(static_cast<T*>(qkv) + token * row_size, cos + token * (head_dim / 2),
                                    sin + token * (head_dim / 2), slots[token], num_heads, *page_shape, layer,
                                    static_cast<T*>(pages));
        }
    });
}
