"""Speaks the OpenAI HTTP API of a gateway: asks for models, and streams the events of one generation."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from common.errors import GenerationFailed, ModelNotFound, PeerUnreachable, RequestError, TandemError, Unavailable

DONE = b"[DONE]"
CONNECT_TIMEOUT_S = 10.0

Body = Mapping[str, object]


class GatewayClient:
    """One connection pool to one gateway; enter it inside the event loop that uses it.

    Every method raises `PeerUnreachable` when nobody listens or the connection breaks, `RequestError` or `Unavailable`
    when the gateway refuses, `GenerationFailed` when an answer ends with an error.
    """

    def __init__(
        self, url: str, timeout_s: float | None = None, api_key: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls),
            timeout=self._timeout,
            headers=self._headers,
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """Return the name of a model that the gateway serves."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                await _refuse_unless_ok(response)
                listed = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(self._url, error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise PeerUnreachable(f"{self._url} is no gateway: its list of models cannot be read") from error
        if not listed:
            raise ModelNotFound(f"{self._url} serves no model yet")
        return str(listed[0]["id"])

    async def stream(self, path: str, body: Body) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a streamed answer until its [DONE]."""
        try:
            async with self._session.post(self._url + path, json={**body, "stream": True}) as response:
                await _refuse_unless_ok(response)
                async for payload in _payloads(response.content):
                    if payload == DONE:
                        return
                    yield _chunk(payload)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(self._url, error) from error
        raise GenerationFailed("the stream ended without [DONE]")


async def _payloads(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield what stands behind each `data:` of an event stream; comments and other fields are skipped."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _chunk(payload: bytes) -> dict[str, Any]:
    try:
        chunk = msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise GenerationFailed(f"unreadable event: {error}") from error
    if "error" in chunk:
        raise GenerationFailed(_message_in(chunk["error"]) or "the answer ended with an error")
    return chunk


async def _refuse_unless_ok(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    raise _refusal(response.status, await response.read())


def _refusal(status: int, body: bytes) -> TandemError:
    try:
        message = _message_in(msgspec.json.decode(body, type=dict[str, Any]).get("error"))
    except msgspec.DecodeError:
        message = None
    line = message or f"HTTP status {status}"
    return Unavailable(line) if status >= 500 else RequestError(line)


def _message_in(error: object) -> str | None:
    message = error.get("message") if isinstance(error, dict) else None
    return None if message is None else str(message)


def _unreachable(url: str, error: Exception) -> PeerUnreachable:
    if isinstance(error, aiohttp.InvalidURL):
        return PeerUnreachable(f"{url} is no URL")
    if isinstance(error, aiohttp.ClientSSLError):
        reason = error.certificate_error if isinstance(error, aiohttp.ClientConnectorCertificateError) else error
        return PeerUnreachable(f"no trusted connection to {url} (see --ca): {reason}")
    if isinstance(error, aiohttp.ClientConnectorError):
        return PeerUnreachable(f"no gateway answers at {url}: {error.strerror or error}")
    return PeerUnreachable(f"the connection to {url} broke: {str(error) or type(error).__name__}")
