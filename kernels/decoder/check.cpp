#include "parameters.h"

namespace tandem {

namespace {

bool are_below(const int64_t* numbers, int64_t count, int64_t end) {
    return std::all_of(numbers, numbers + count, [=](int64_t number) { return number >= 0 && number < end; });
}

}  // namespace

BatchError check(const DecoderBatch& batch, int64_t vocab_size) {
    if (!are_below(batch.token_ids, batch.num_tokens, vocab_size)) return BatchError::kToken;
    if (!are_below(batch.slots, batch.num_tokens, batch.num_blocks * batch.block_size)) return BatchError::kSlot;
    if (!are_below(batch.wanted, batch.num_wanted, batch.num_tokens)) return BatchError::kWanted;
    const AttentionBatch& attention = batch.attention;
    int64_t num_tokens = 0;
    for (int64_t index = 0; index < attention.num_sequences; ++index) {
        const int64_t length = attention.query_lengths[index], context = attention.context_lengths[index];
        const int64_t num_blocks = (context + batch.block_size - 1) / batch.block_size;
        if (length < 0 || length > context || num_blocks > attention.table_stride) return BatchError::kLengths;
        const int64_t* const table = attention.block_tables + index * attention.table_stride;
        if (!are_below(table, num_blocks, batch.num_blocks)) return BatchError::kBlock;
        num_tokens += length;
    }
    return num_tokens == batch.num_tokens ? BatchError::kNone : BatchError::kLengths;
}

}  // namespace tandem
