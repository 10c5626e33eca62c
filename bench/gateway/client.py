"""A client that costs little: raw connections that keep what they receive, and look into it when the time is over.

While a measurement runs a chunk of bytes costs one search for the beginnings of events, and no JSON is read. `Reading`
then reads all of it, so that no token may be missing, doubled or changed.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from bench.gateway.script import MODEL, STOPS

EVENT = b"data: "
LAST_CHUNK = b"0\r\n\r\n"
HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
PATH = "/v1/chat/completions"
TOLD_BYTES = 300
PROMPT = "Tell me in a few words what one may do with this program, and what one may not."


class BrokenAnswer(Exception):
    """An answer is not what the script says."""


def request_bytes(port: int, num_tokens: int, seed: int, *, streams: bool = True, headers: str = "") -> bytes:
    """Return a request for an answer of so many tokens; `seed` tells it apart. `headers` are whole lines."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num_tokens,
        "seed": seed,
        "temperature": 0.7,
        "stop": STOPS,
        "stream": streams,
    }
    content = msgspec.json.encode(body)
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}{headers}Authorization: Bearer none\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


class Connection(asyncio.Protocol):
    """One keep-alive connection; `ask` sends a request and waits for the end of its answer."""

    def __init__(self, counter: "EventCounter") -> None:
        self._counter = counter
        self._transport: asyncio.Transport
        self._chunks: list[bytes] = []
        self._times_s: list[float] = []
        self._over: asyncio.Future[None] | None = None
        self._size: int | None = None

    @classmethod
    async def open(cls, port: int, counter: "EventCounter") -> "Connection":
        """Connect."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(counter), "127.0.0.1", port)
        return connection

    @property
    def received(self) -> bytes:
        """What has come of the answer so far."""
        return b"".join(self._chunks)

    @property
    def is_open(self) -> bool:
        """Whether it can be asked again."""
        return not self._transport.is_closing()

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    async def ask(self, request: bytes) -> "Reading":
        """Return the answer; raises `BrokenAnswer` if the connection ends before it."""
        self._chunks, self._times_s, self._size = [], [], None
        self._over = asyncio.get_running_loop().create_future()
        asked_s = time.monotonic()
        self._transport.write(request)
        await self._over
        return Reading(asked_s, self._times_s, self._chunks)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            received = b"".join(self._chunks)[-TOLD_BYTES:]
            self._over.set_exception(BrokenAnswer(f"the connection ended behind {received!r}"))

    def data_received(self, data: bytes) -> None:
        self._times_s.append(time.monotonic())
        self._chunks.append(data)
        self._counter.num_events += data.count(EVENT)
        if self._is_last(data) and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _is_last(self, data: bytes) -> bool:
        if len(self._chunks) == 1:
            head_size = data.index(HEAD_END) + len(HEAD_END)
            if (found := LENGTH.search(data, 0, head_size)) is not None:
                self._size = head_size + int(found[1])
            elif head_size == len(data):
                return False  # the name of a request may end like a body
        if self._size is None:
            return data.endswith(LAST_CHUNK)
        return sum(map(len, self._chunks)) >= self._size


class EventCounter:
    """Events that have begun to arrive on all connections of a measurement."""

    def __init__(self) -> None:
        self.num_events = 0


class Reading:
    """An answer as it arrived: `chunks[i]` at `times_s[i]`, on the monotonic clock."""

    def __init__(self, asked_s: float, times_s: Sequence[float], chunks: Sequence[bytes]) -> None:
        self.asked_s = asked_s
        self._times_s = times_s
        self._chunks = chunks
        self.num_events = 0
        """Events with text, once `tokens` has been called."""

    @property
    def status(self) -> int:
        """The status of the answer."""
        return int(self._chunks[0].split(b" ", 2)[1])

    def check_whole(self, text: str) -> None:
        """Raise `BrokenAnswer` unless this is one JSON answer of that text."""
        body = b"".join(self._chunks).partition(HEAD_END)[2]
        if self.status != 200 or msgspec.json.decode(_unchunked(body))["choices"][0]["message"]["content"] != text:
            raise BrokenAnswer(f"not the answer of the script: {body[:TOLD_BYTES]!r}")

    def content_events(self) -> list[tuple[str, float]]:
        """Return the text of each event that has some, with its arrival; raises `BrokenAnswer` for a stream that was
        refused, broke, or has no end."""
        if self.status != 200:
            raise BrokenAnswer(f"refused: {self._chunks[0][:TOLD_BYTES]!r}")
        *contents, (last, _) = [(_content_of(event), at) for event, at in self._events()]
        if last is not None:
            raise BrokenAnswer(f"the stream has no end: {self._chunks[-1][-TOLD_BYTES:]!r}")
        return [(content, at) for content, at in contents if content]

    def tokens(self, pieces: Sequence[str]) -> list[float]:
        """Return when the token of each piece arrived; raises `BrokenAnswer` unless each came once, in order."""
        events = self.content_events()
        if "".join([content for content, _ in events]) != "".join(pieces):
            raise BrokenAnswer(f"tokens are missing, doubled or changed: {self._chunks[-1][-TOLD_BYTES:]!r}")
        self.num_events = len(events)
        arrivals, num_chars, (end, at) = [], 0, (0, 0.0)
        rest = iter(events)
        for piece in pieces:
            num_chars += len(piece)
            while end < num_chars:
                content, at = next(rest)
                end += len(content)
            arrivals.append(at)
        return arrivals

    def _events(self) -> list[tuple[bytes, float]]:
        """Return each event with the time at which its last byte arrived."""
        received = b"".join(self._chunks)
        start = received.index(HEAD_END) + len(HEAD_END)
        ends, total = [], 0
        for chunk in self._chunks:
            total += len(chunk)
            ends.append(total)
        events, place = [], 0
        for event, end in _split(received, start):
            while ends[place] < end:
                place += 1
            events.append((event, self._times_s[place]))
        return events


def _split(received: bytes, start: int) -> list[tuple[bytes, int]]:
    """Return the events of a chunked body that begins at `start`, each with where it ends in `received`."""
    events: list[tuple[bytes, int]] = []
    held = b""
    while True:
        line_end = received.index(b"\r\n", start)
        size = int(received[start:line_end], 16)
        if size == 0:
            return events
        first = line_end + 2
        content = held + received[first : first + size]
        *whole, held = content.split(b"\n\n")
        at = first - (len(content) - size)
        for event in whole:
            at += len(event) + 2
            if event.startswith(EVENT):
                events.append((event[len(EVENT) :], at))
        start = first + size + 2


def _content_of(event: bytes) -> str | None:
    """Return the text of one event; None if it is the last one."""
    if event == b"[DONE]":
        return None
    chunk: dict[str, Any] = msgspec.json.decode(event)
    if "error" in chunk:
        raise BrokenAnswer(f"an error: {event!r}")
    choices = chunk["choices"]
    if not choices:
        return ""
    return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""


def _unchunked(body: bytes) -> bytes:
    """Return the content of a body, whichever way it was sent."""
    if not body.endswith(LAST_CHUNK):
        return body
    content, start = b"", 0
    while True:
        line_end = body.index(b"\r\n", start)
        size = int(body[start:line_end], 16)
        if size == 0:
            return content
        content += body[line_end + 2 : line_end + 2 + size]
        start = line_end + 4 + size
