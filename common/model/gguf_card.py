"""What a GGUF file says about text."""

from tokenizers import Tokenizer

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.gguf_metadata import GgufMetadata
from common.model.gguf_tokenizer import TokenType, build_tokenizer, pre_tokenizer_kind, token_types

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>")
"""Control tokens that end a turn in every model that has them, whether or not the file says so."""


def read_card_source(metadata: GgufMetadata) -> CardSource:
    """Return what the file says about text; raise `ModelUnusable` if its tokenizer cannot be rebuilt."""
    tokenizer = _build_checked(metadata)
    tokens = metadata.require_list("tokenizer.ggml.tokens", str)
    bos, eos = (_token_id(metadata, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("bos", "eos"))
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool)
    wants_bos = pre_tokenizer_kind(metadata).adds_bos if add_bos is None else add_bos
    return CardSource(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template", str),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        eos_ids=_eos_ids(metadata, tokens, eos),
        add_bos=wants_bos and bos is not None,
    )


def _build_checked(metadata: GgufMetadata) -> Tokenizer:
    try:
        return build_tokenizer(metadata)
    except ModelUnusable:
        raise
    except Exception as error:  # the library raises bare Exception, e.g. for a merge of unknown tokens
        raise ModelUnusable(f"{metadata.path}: the tokenizer cannot be rebuilt ({error})") from error


def _eos_ids(metadata: GgufMetadata, tokens: list[str], eos: int | None) -> tuple[int, ...]:
    types = token_types(metadata, len(tokens))
    declared = {eos, _token_id(metadata, "tokenizer.ggml.eot_token_id", tokens)}
    by_text = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL and token in _END_OF_TURN
    }
    return tuple(sorted(by_text | {index for index in declared if index is not None}))


def _token_id(metadata: GgufMetadata, key: str, tokens: list[str]) -> int | None:
    index = metadata.get(key, int)
    if index is not None and not 0 <= index < len(tokens):
        raise ModelUnusable(f"{metadata.path}: {key} is {index}, but there are {len(tokens)} tokens")
    return index
