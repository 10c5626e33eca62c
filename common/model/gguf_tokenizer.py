"""Rebuilds a byte-level BPE tokenizer from the metadata of a GGUF file.

The file names its pre-tokenizer only by a word; what each word means is fixed by the conversion scripts and the readers
of the format. A word that is not known here is refused: a wrong split is not an error later, only a worse model.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from common.errors import ModelUnusable
from common.model.gguf_metadata import GgufMetadata

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizerKind:
    """What a value of `tokenizer.ggml.pre` means.

    `ignores_merges`: a word that is a token is taken whole. `adds_bos`: unless the file says otherwise.
    """

    build: Callable[[], PreTokenizer]
    ignores_merges: bool = False
    adds_bos: bool = False


def _split_by(*patterns: str) -> PreTokenizer:
    splits = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2_split() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2_split()])


_LLAMA3 = PreTokenizerKind(lambda: _split_by(_LLAMA3_WORDS), ignores_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerKind] = {
    "default": PreTokenizerKind(lambda: _split_by(*_DEFAULT_SPLITS)),
    "gpt-2": PreTokenizerKind(_gpt2_split),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smollm": PreTokenizerKind(_smollm_split),
}


def pre_tokenizer_kind(metadata: GgufMetadata) -> PreTokenizerKind:
    """Return the pre-tokenizer that the file names; raise `ModelUnusable` if it is none of ours."""
    model = metadata.require("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelUnusable(f"{metadata.path}: tokenizer model {model} is not supported, only gpt2 (byte-level BPE)")
    name = metadata.require("tokenizer.ggml.pre", str)
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelUnusable(f"{metadata.path}: pre-tokenizer {name} is not supported, only {known}")
    return kind


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Return the tokenizer of the file; token ids are positions in `tokenizer.ggml.tokens`."""
    kind = pre_tokenizer_kind(metadata)
    tokens = metadata.require_list("tokenizer.ggml.tokens", str)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(metadata),
            ignore_merges=kind.ignores_merges,
        )
    )
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, token_types(metadata, len(tokens)))
    return tokenizer


def token_types(metadata: GgufMetadata, num_tokens: int) -> list[int]:
    """Return the `TokenType` value of every token."""
    types = metadata.require_list("tokenizer.ggml.token_type", int)
    if len(types) != num_tokens:
        raise ModelUnusable(f"{metadata.path}: {num_tokens} tokens, but {len(types)} token types")
    return types


def _merges(metadata: GgufMetadata) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.require_list("tokenizer.ggml.merges", str):
        left, space, right = line.partition(" ")
        if not space:
            raise ModelUnusable(f"{metadata.path}: merge {line!r} is not a pair")
        merges.append((left, right))
    return merges


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are found in text before any splitting; only the former are special."""
    whole = [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)
