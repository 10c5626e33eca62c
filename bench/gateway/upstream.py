"""An OpenAI server that computes nothing: what other routers pass on, and what a client sees without any router."""

import asyncio
from typing import Any, cast

import msgspec

from bench.gateway.pacing import BURST, Pacer
from bench.gateway.script import MODEL, Script, sse_ending, sse_opening, whole_answer

HEAD_END = b"\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Upstream:
    """Listens at `port` between `start` and `stop`."""

    def __init__(self, script: Script, pacer: Pacer) -> None:
        self.script = script
        self.pacer = pacer
        self.port = 0
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self) -> None:
        """Take connections."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Break every connection, as the end of the process would."""
        for connection in list(self.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        """Take no more."""
        if self._server is not None:
            self._server.close()


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with at most one answer on its way."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = b""
        self._answer: _Answer | None = None
        self.transport: asyncio.Transport
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._upstream.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._upstream.connections.discard(self)
        if self._answer is not None:
            self._upstream.pacer.remove(self._answer)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(HEAD_END)
        if not separator or len(rest) < (size := _content_length(head)):
            return
        self._received = rest[size:]
        self._take(head, rest[:size])

    def resume_writing(self) -> None:
        if self._answer is not None:
            self._answer.resume()

    def pause_writing(self) -> None:
        if self._answer is not None:
            self._answer.is_paused = True

    def _take(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            self._reply(msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
            return
        asked: dict[str, Any] = msgspec.json.decode(body)
        num_tokens = asked.get("max_tokens", BURST)
        if not asked.get("stream"):
            self._reply(whole_answer(self._upstream.script.text(num_tokens), num_tokens))
            return
        self.transport.write(STREAM_HEAD + sse_opening())
        self._answer = _Answer(self, self._upstream.script, asked.get("seed", 0), num_tokens)
        if self._upstream.pacer.interval_s is not None:
            self._upstream.pacer.add(self._answer)
        else:
            self._answer.resume()

    def _reply(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class _Answer:
    """One stream to a client."""

    def __init__(self, connection: _Connection, script: Script, seed: int, num_tokens: int) -> None:
        self.seed = seed
        self.is_paused = False
        self._connection = connection
        self._chunks = script.sse_chunks
        self._num_wanted = num_tokens
        self._num_written = 0

    def write(self, num_tokens: int) -> bool:
        """See `Outlet.write`."""
        first = self._num_written
        self._num_written = end = min(first + num_tokens, self._num_wanted)
        is_over = end == self._num_wanted
        self._connection.transport.write(b"".join(self._chunks[first:end]) + (sse_ending() if is_over else b""))
        return not is_over

    def resume(self) -> None:
        """Write as fast as the client reads."""
        self.is_paused = False
        self._write_on()

    def _write_on(self) -> None:
        if self._connection.is_open and not self.is_paused and self.write(BURST):
            asyncio.get_running_loop().call_soon(self._write_on)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
