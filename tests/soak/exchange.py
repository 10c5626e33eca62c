"""One request of a soak and the form of what came back: deltas, one reason, the usage, one [DONE]; or one error."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.fault_client import Answer, Refusal
from tests.support.told_choices import ToldChoices

CONNECT_S = 10.0
REQUEST_ID = "x-request-id"


class Malformed(AssertionError):
    """What came back has not the form of an answer nor of an error."""


class Hanging(AssertionError):
    """Neither an end nor an error came in time."""


@dataclass(eq=False)
class Exchange:
    """Started with `start`, over with `over`. `has_head`: the response has begun; `has_text`: some of it is there."""

    url: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    request: str = ""
    """Id by which gateway and workers know it, as far as the client was told."""

    def __post_init__(self) -> None:
        self.has_head = asyncio.Event()
        self.has_text = asyncio.Event()
        self.told = ToldChoices(self.body.get("n", 1))
        self._usage: dict[str, Any] | None = None
        self._refusal: Refusal | None = None
        self._num_done = 0
        self._task: asyncio.Task[None]

    @property
    def text(self) -> str:
        """What the client has of the first choice."""
        return self.told[0].text

    def start(self) -> "Exchange":
        """Send it."""
        self._task = asyncio.create_task(self._run())
        return self

    async def has(self, event: asyncio.Event) -> bool:
        """Wait for an event of this exchange or its end; return whether it still goes on."""
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not self._task.done()

    async def leave(self) -> None:
        """Hang up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def over(self, deadline_s: float) -> Answer | Refusal:
        """Wait for the end. Raises `Hanging` and `Malformed`; then the client has hung up."""
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        if not done:
            await self.leave()
            raise Hanging(f"neither an end nor an error within {deadline_s} s")
        self._task.result()
        _must(not self.told.contradiction, self.told.contradiction)
        if self._refusal is not None:  # a broken connection may come behind all else
            is_alone = not (self.told.is_whole or self._num_done)
            _must(is_alone or not self._refusal.is_clean, "more than an error")
            return self._refusal
        _must(self._num_done == int(bool(self.body.get("stream"))), f"{self._num_done} times [DONE]")
        if not self.told.is_whole or self._usage is None:
            raise Malformed(f"an end of {self.told} with usage {self._usage}")
        return Answer.of(self.told, self._usage)

    async def _run(self) -> None:
        body = dict(self.body)
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self.url}{self.path}", json=body, headers=self.headers) as response,
            ):
                self.request = response.headers.get(REQUEST_ID, "")
                self.has_head.set()
                await self._read(response)
        except (aiohttp.ClientError, ConnectionError) as error:
            self._refusal = Refusal(0, type(error).__name__, is_clean=False)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            detail = (await response.json())["error"]
            self._refusal = Refusal(response.status, detail["code"] or "", response.headers.get("Retry-After"))
        elif self.body.get("stream"):
            async for line in response.content:
                self._take_line(line.strip())
        else:
            self._take(await response.json())

    def _take_line(self, line: bytes) -> None:
        if not line or line.startswith(b":"):
            return
        _must((self._refusal, self._num_done) == (None, 0), f"{line!r} behind the end")
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            self._num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self._refusal = Refusal(200, event["error"]["code"] or "")
        else:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if self.told.take(event):
            self.has_text.set()
        self._usage = event.get("usage") or self._usage


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Malformed(what)
