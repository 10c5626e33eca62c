"""Makes the `ModelCard` that workers publish, so that gateways need no model files."""

import zlib

from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard
from common.model.checkpoint import Checkpoint


def build_card(
    checkpoint: Checkpoint, *, model: ModelName, fingerprint: Fingerprint, max_context: int, created: int
) -> ModelCard:
    """Return the card of `checkpoint`, served as `model` with at most `max_context` tokens since `created` (unix s).

    Raises `ModelUnusable` if the checkpoint has no usable tokenizer.
    """
    source = checkpoint.card_source()
    return ModelCard(
        model=model,
        fingerprint=fingerprint,
        tokenizer=zlib.compress(source.tokenizer_json.encode()),
        vocab_size=checkpoint.config.vocab_size,
        max_context=max_context,
        eos_ids=source.eos_ids,
        created=created,
        chat_template=source.chat_template,
        bos_token=source.bos_token,
        eos_token=source.eos_token,
        add_bos=source.add_bos,
        default_temperature=source.temperature,
        default_top_p=source.top_p,
        default_top_k=source.top_k,
    )
