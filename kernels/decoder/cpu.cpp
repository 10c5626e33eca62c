#include "../native/entry.h"
#include "decoder.h"

using namespace tandem;

// `cores` are `num_borrowed` cores of other processes; core c is in use while board[c] is not 0.
TANDEM_ENTRY AnyDecoder* tandem_decoder_new(int32_t dtype, const DecoderParameters* parameters, int32_t num_threads,
                                            const int32_t* cores, int32_t num_borrowed, const uint32_t* board) {
    AnyDecoder* decoder = nullptr;
    const auto borrowed = borrowed_cores(cores, num_borrowed, board);
    with_type(dtype, [&]<typename T>(T*) { decoder = new Decoder<T>(*parameters, num_threads, borrowed); });
    return decoder;
}

TANDEM_ENTRY void tandem_decoder_delete(AnyDecoder* decoder) { delete decoder; }

TANDEM_ENTRY int32_t tandem_decoder_forward(AnyDecoder* decoder, const DecoderBatch* batch) {
    return static_cast<int32_t>(decoder->forward(*batch));
}

TANDEM_ENTRY void tandem_decoder_head(AnyDecoder* decoder, const void* hidden, int64_t num_rows, float* logits) {
    decoder->head(hidden, num_rows, logits);
}
