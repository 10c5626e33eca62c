"""Bytes of the records in Redis: tagged MessagePack; unknown fields are ignored, new ones have defaults.

Versions meet during every deploy, so decoding accepts records of the neighbouring version; anything else is a
`MalformedRecord`, never a half-built value.
"""

import array
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from common.errors import MalformedRecord
from common.messages.job import Job, PrefillTask
from common.messages.notice import CancelNotice
from common.messages.registry import ModelCard, WorkerLoad, WorkerRecord
from common.messages.tenant import ApiKey

Record = Job | PrefillTask | WorkerRecord | WorkerLoad | ModelCard | CancelNotice | ApiKey
RecordT = TypeVar("RecordT", Job, PrefillTask, WorkerRecord, WorkerLoad, ModelCard, CancelNotice, ApiKey)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """Return the tagged MessagePack bytes of `record`."""
    return _encoder.encode(record)


def decode(data: bytes, expected: type[RecordT]) -> RecordT:
    """Return the record in `data`; raise `MalformedRecord` if it is not a well-formed `expected`."""
    try:
        record = _decoder.decode(data)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise MalformedRecord(expected.__name__, str(error)) from error
    if not isinstance(record, expected):
        raise MalformedRecord(expected.__name__, f"got a {type(record).__name__}")
    return record


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids in `data`; raise `MalformedRecord` if it is not a whole number of uint32."""
    if len(data) % 4:
        raise MalformedRecord("token ids", f"{len(data)} bytes is not a multiple of 4")
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
