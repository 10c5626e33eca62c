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
    stream = EventStream(make_mocked_request("POST", "/"), write_timeout_s=0.05)
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
