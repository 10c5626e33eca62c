"""A server-sent event stream to one client: framing, keep-alive comments, back-pressure, and a limit on both ends.

The response starts with the first write, so an error before it can still be an ordinary HTTP answer.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.hdrs import TRANSFER_ENCODING

from gateway.patience import Patience
from gateway.schemas.errors import ErrorBody

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

MAX_UNSENT_BYTES: Final = 1 << 14
"""So much of a stream the kernel takes beyond what is on its way. By itself it takes megabytes for a client that reads
slowly, and nobody sees for minutes whether that client still reads."""

MAX_BUFFERED_BYTES: Final = 1 << 16
"""So much may wait in the process for a client to take it, as much as aiohttp lets wait."""

HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}


def event_of(payload: bytes) -> bytes:
    """Return the event that carries one line of JSON."""
    return b"data: %b\n\n" % payload


def error_event(error: ErrorBody) -> bytes:
    """Return the event that ends a broken stream."""
    return event_of(msgspec.json.encode(error))


class EventStream:
    """Owned by one request handler. Raises `ConnectionError` when the client is gone or takes nothing any more.

    `failure` makes the event that ends it when it breaks.
    """

    def __init__(
        self, request: web.Request, write_timeout_s: float, failure: Callable[[ErrorBody], bytes] = error_event
    ) -> None:
        self._request = request
        self._failure = failure
        self._patience = Patience(write_timeout_s / 2, self._has_taken_some)
        self._num_waiting: int | None = None
        """Bytes that the client had not taken at the last look during this write."""
        self._response: web.StreamResponse | None = None
        self._open: asyncio.Transport | None = None
        """Where chunks can be written past the response: its head and a first chunk have been."""
        self._is_done = False

    @property
    def response(self) -> web.StreamResponse | None:
        """The started response, None before the first write."""
        return self._response

    async def send(self, events: bytes, *, is_last: bool = False) -> None:
        """Write events, all in one write. Nothing follows the last ones."""
        self._is_done = self._is_done or is_last  # once it is written, even if the client takes it late
        await self._write(events)

    def offer(self, events: Sequence[bytes]) -> bool:
        """Write events, all in one write, if the client keeps up; False: nothing is written, `send` them.

        This is the way of most tokens: the response's own `write` takes three times as long.
        """
        transport = self._open
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            return False
        chunk = events[0] if len(events) == 1 else b"".join(events)
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    async def ping(self) -> None:
        """Write a comment, so that nothing between us and the client takes the silence for an end."""
        await self._write(PING)

    async def fail(self, error: ErrorBody) -> web.StreamResponse:
        """Write the event that ends a broken stream, without `[DONE]`; the connection is closed behind it.

        Nothing is written behind the last event: what failed then is the delivery.
        """
        try:
            if not self._is_done:
                await self.send(self._failure(error))
        finally:
            self.close()
        assert self._response is not None  # sending has started it
        self._response.force_close()
        return self._response

    def close(self) -> None:
        """Stop the timer; the response itself ends when its handler returns."""
        self._patience.close()

    def _has_taken_some(self) -> bool:
        """Whether the client takes bytes, however slowly: asked after each half of the time that it has."""
        transport, before = self._request.transport, self._num_waiting
        self._num_waiting = 0 if transport is None else transport.get_write_buffer_size()
        return before is None or self._num_waiting < before

    async def _write(self, chunk: bytes) -> None:
        self._num_waiting = None
        try:
            with self._patience:
                response = self._response or await self._start()
                await response.write(chunk)
                if self._open is None and response.headers.get(TRANSFER_ENCODING) == "chunked":
                    self._open = self._request.transport
        except TimeoutError as error:
            if self._patience.is_over:
                self._abort()
                raise ConnectionResetError("the client takes no more bytes") from error
            raise

    async def _start(self) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(self._request)
        _keep_unsent_short(self._request.transport)
        self._response = response
        return response

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _keep_unsent_short(transport: asyncio.BaseTransport | None) -> None:
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
