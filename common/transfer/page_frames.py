"""The messages of the TCP page server: fixed-size binary fields, bounded counts, nothing nested.

request   magic, count, epoch, then count * (page, generation)
reply     magic, status, count; if the status is PAGES: the bytes of every page in order, then every page's
          generation (uint64), read by the server after the bytes have left it
"""

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from common.errors import MalformedRecord
from common.messages.ids import BlockId, Epoch, Generation

MAX_PAGES = 1024
"""Pages of one request: the most that a server reads (12 KiB) before it has checked anything."""

_REQUEST_MAGIC = b"tpRq"
_REPLY_MAGIC = b"tpRp"
_REQUEST = struct.Struct("<4sIQ")
_PAGE = struct.Struct("<IQ")
_REPLY = struct.Struct("<4sBI")
REQUEST_BYTES = _REQUEST.size
PAGE_BYTES = _PAGE.size
REPLY_BYTES = _REPLY.size
GENERATION_BYTES = 8


class PageRef(NamedTuple):
    """A page of the server's pool, and the generation that it must have."""

    page: BlockId
    generation: Generation


class PageRequest(NamedTuple):
    """The head of a request: so many pages of that incarnation follow."""

    num_pages: int
    epoch: Epoch


class Status(enum.IntEnum):
    """What follows a reply's head."""

    PAGES = 1
    STALE = 2


def pack_request(epoch: Epoch, pages: Sequence[PageRef]) -> bytes:
    """Return the bytes of a request for at most `MAX_PAGES` pages."""
    assert 0 < len(pages) <= MAX_PAGES
    return _REQUEST.pack(_REQUEST_MAGIC, len(pages), epoch) + b"".join(_PAGE.pack(*page) for page in pages)


def unpack_request(data: bytes) -> PageRequest:
    """Return the head of a request, given its `REQUEST_BYTES`; raise `MalformedRecord`."""
    if len(data) != REQUEST_BYTES:
        raise MalformedRecord("page request", f"{len(data)} bytes")
    magic, num_pages, epoch = _REQUEST.unpack(data)
    if magic != _REQUEST_MAGIC:
        raise MalformedRecord("page request", "wrong magic")
    if not 0 < num_pages <= MAX_PAGES:
        raise MalformedRecord("page request", f"{num_pages} pages, the limit is {MAX_PAGES}")
    return PageRequest(num_pages, Epoch(epoch))


def unpack_pages(data: bytes) -> list[PageRef]:
    """Return the pages of a request, given its body; raise `MalformedRecord`."""
    if len(data) % PAGE_BYTES:
        raise MalformedRecord("page request", f"a body of {len(data)} bytes")
    return [PageRef(BlockId(page), Generation(generation)) for page, generation in _PAGE.iter_unpack(data)]


def pack_reply(status: Status, num_pages: int) -> bytes:
    """Return the head of a reply."""
    return _REPLY.pack(_REPLY_MAGIC, status, num_pages)


def unpack_reply(data: bytes, num_requested: int) -> Status:
    """Return the status of the reply to a request for `num_requested` pages; raise `MalformedRecord`."""
    if len(data) != REPLY_BYTES:
        raise MalformedRecord("page reply", f"{len(data)} bytes")
    magic, status, num_pages = _REPLY.unpack(data)
    if magic != _REPLY_MAGIC:
        raise MalformedRecord("page reply", "wrong magic")
    if num_pages != num_requested:
        raise MalformedRecord("page reply", f"{num_pages} pages instead of {num_requested}")
    try:
        return Status(status)
    except ValueError as error:
        raise MalformedRecord("page reply", f"unknown status {status}") from error


def pack_generations(generations: Sequence[int]) -> bytes:
    """Return the tail of a reply."""
    return struct.pack(f"<{len(generations)}Q", *generations)


def unpack_generations(data: bytes) -> list[Generation]:
    """Return the generations in a reply's tail; raise `MalformedRecord`."""
    if len(data) % GENERATION_BYTES:
        raise MalformedRecord("page reply", f"a tail of {len(data)} bytes")
    return [Generation(value) for (value,) in struct.iter_unpack("<Q", data)]
