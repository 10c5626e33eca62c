"""What a gateway and its compiler processes say to each other: frames of MessagePack behind their length."""

from typing import NewType

import msgspec

from gateway.guidance.source import Source

LENGTH_BYTES = 4

TokenizerId = NewType("TokenizerId", str)
"""Equal for equal vocabularies; says nothing else."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Make a tokenizer ready; the fields of the model card."""

    id: TokenizerId
    tokenizer: bytes
    vocab_size: int
    eos_ids: tuple[int, ...]


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Compile what follows from a source, for a tokenizer that may have been loaded before."""

    tokenizer: TokenizerId
    source: Source


Order = Load | Compile


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The tokenizer is ready."""


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """No grammar can be followed with this tokenizer."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The tokenizer has to be loaded first: it never was, or had to make room."""


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The grammar in llguidance's JSON form; workers will take it."""

    grammar: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The source has no grammar that can be followed; `reason` says so of "it"."""

    reason: str


Reply = Loaded | Unusable | Unknown | Compiled | Refused

order_decoder = msgspec.msgpack.Decoder(Order)
reply_decoder = msgspec.msgpack.Decoder(Reply)


def frame(message: Order | Reply) -> bytes:
    """Return the bytes that carry a message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
