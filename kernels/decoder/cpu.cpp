#include "../native/entry.h"
#include "decoder.h"

using namespace tandem;

TANDEM_ENTRY AnyDecoder* tandem_decoder_new(int32_t dtype, const DecoderParameters* parameters, int32_t num_threads) {
    AnyDecoder* decoder = nullptr;
    with_type(dtype, [&]<typename T>(T*) { decoder = new Decoder<T>(*parameters, num_threads); });
    return decoder;
}

TANDEM_ENTRY void tandem_decoder_delete(AnyDecoder* decoder) { delete decoder; }

TANDEM_ENTRY int32_t tandem_decoder_forward(AnyDecoder* decoder, const DecoderBatch* batch) {
    return static_cast<int32_t>(decoder->forward(*batch));
}

TANDEM_ENTRY void tandem_decoder_head(AnyDecoder* decoder, const void* hidden, int64_t num_rows, float* logits) {
    decoder->head(hidden, num_rows, logits);
}
