"""How a stream of events ends: once."""

import asyncio
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.schemas.errors import ErrorBody, ErrorDetail
from gateway.sse import DONE, EventStream, event_of


class SlowResponse:
    """A started response whose client takes nothing: bytes are kept, and the writer waits."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.written = b""
        self.is_closed = False

    async def write(self, chunk: bytes) -> None:
        self.written += chunk
        await asyncio.Event().wait()

    def force_close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_last", [True, False])
async def test_an_error_behind_done_is_not_told(is_last: bool) -> None:
    """The deadline passes, or the gateway is stopped, while the client is slow to take the end."""
    stream = EventStream(make_mocked_request("POST", "/", transport=Transport()), write_timeout_s=0.05)
    response: Any = SlowResponse()
    stream._response = response
    sending = asyncio.create_task(stream.send(event_of(b"{}") + (DONE if is_last else b""), is_last=is_last))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    failing = asyncio.create_task(stream.fail(ErrorBody(ErrorDetail("it broke", "server_error"))))
    await asyncio.wait([failing])
    assert (b"error" in response.written) != is_last
    assert failing.exception() is None or isinstance(failing.exception(), ConnectionResetError)


class Transport(asyncio.Transport):
    """Keeps what is written; `num_waiting` bytes have not been taken by the client."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.num_waiting = 0
        self.is_gone = False

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(chunk))

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def is_closing(self) -> bool:
        return self.is_gone

    def abort(self) -> None:
        self.is_gone = True


async def test_a_client_that_takes_bytes_is_not_dropped_and_one_that_takes_none_is() -> None:
    transport = Transport()
    stream = EventStream(make_mocked_request("POST", "/", transport=transport), write_timeout_s=0.2)
    response: Any = SlowResponse()
    stream._response = response
    transport.num_waiting, loop = 1000, asyncio.get_running_loop()
    begin_s = loop.time()
    sending = asyncio.create_task(stream.send(event_of(b"{}")))

    def take() -> None:
        transport.num_waiting -= 1
        if loop.time() < begin_s + 0.8:
            loop.call_later(0.01, take)

    take()
    await asyncio.wait([sending])
    assert isinstance(sending.exception(), ConnectionResetError)
    assert loop.time() - begin_s > 0.8
    assert transport.is_gone
    stream.close()


async def started(transport: Transport) -> EventStream:
    stream = EventStream(make_mocked_request("POST", "/", transport=transport), write_timeout_s=5.0)
    response: Any = StartedResponse()
    stream._response = response
    await stream.send(event_of(b"1"))
    return stream


class StartedResponse:
    """A started response that is sent in chunks."""

    def __init__(self) -> None:
        self.headers = {"Transfer-Encoding": "chunked"}

    async def write(self, chunk: bytes) -> None:
        pass


async def test_a_client_that_keeps_up_is_written_to_past_the_response() -> None:
    transport = Transport()
    stream = await started(transport)
    assert stream.offer([event_of(b"23")])
    assert transport.written == [b"a\r\ndata: 23\n\n\r\n"]
    stream.close()


async def test_nothing_is_written_past_a_response_that_has_not_begun() -> None:
    transport = Transport()
    stream = EventStream(make_mocked_request("POST", "/", transport=transport), write_timeout_s=5.0)
    assert not stream.offer([event_of(b"1")])
    assert transport.written == []


async def test_a_client_that_lags_or_is_gone_is_not_written_to_past_the_response() -> None:
    transport = Transport()
    stream = await started(transport)
    transport.num_waiting = 1 << 20
    assert not stream.offer([event_of(b"2")])
    transport.num_waiting, transport.is_gone = 0, True
    assert not stream.offer([event_of(b"2")])
    assert transport.written == []
    stream.close()
