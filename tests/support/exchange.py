"""One request of a client and the form of what came back: deltas, one reason, the usage, one [DONE]; or one error."""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.polling import until
from tests.support.told_choices import Scored, ToldChoices, are_alike

LONGEST_ANSWER_S = 60.0
"""A client that has heard neither the end nor an error by then was left hanging."""

CONNECT_S = 10.0
REQUEST_ID = "x-request-id"


class Malformed(AssertionError):
    """What came back has not the form of an answer nor of an error."""


class Hanging(AssertionError):
    """Neither an end nor an error came in time."""


@dataclass(frozen=True)
class Answer:
    """What undisturbed clients get. `num_tokens` is the usage's count, of all choices; `others` are text and finish
    reason of those behind the first. Logprobs (`scored`, by choice) are left out of comparisons: they are equal only up
    to rounding."""

    text: str
    finish_reason: str
    num_tokens: int
    num_prompt_tokens: int
    others: tuple[tuple[str, str], ...] = ()
    scored: tuple[tuple[Scored, ...], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, told: ToldChoices, usage: Mapping[str, Any]) -> "Answer":
        """Return what is told when every choice is over."""
        (text, finish), *others = ((choice.text, str(choice.finish)) for choice in told)
        scored = tuple(tuple(choice.scored) for choice in told)
        return cls(text, finish, usage["completion_tokens"], usage["prompt_tokens"], tuple(others), scored)

    def begins_with(self, told: ToldChoices) -> bool:
        """Whether a client that has been told so much has nothing wrong yet."""
        texts = [self.text, *(text for text, _ in self.others)]
        return all(text.startswith(choice.text) for text, choice in zip(texts, told, strict=True))

    def is_scored_like(self, other: "Answer") -> bool:
        """Whether both have the same logprobs, up to rounding."""
        is_as_long = len(self.scored) == len(other.scored)
        return is_as_long and all(are_alike(*pair) for pair in zip(self.scored, other.scored, strict=True))


@dataclass(frozen=True)
class Refusal:
    """An error: its status (200: an event of a stream), its code, and whether it came as an error object at all."""

    status: int
    code: str
    retry_after: str | None = None
    is_clean: bool = True


@dataclass(eq=False)
class Exchange:
    """Started with `start`, over with `over`. `has_head`: the response has begun; `has_text`: some of it is there."""

    url: str
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    request: str = ""
    """Id by which gateway and workers know it, as far as the client was told."""
    told: ToldChoices = field(init=False)
    times: list[float] = field(default_factory=list)
    """When each piece of text came (monotonic)."""
    ended_at: float | None = None

    def __post_init__(self) -> None:
        self.has_head = asyncio.Event()
        self.has_text = asyncio.Event()
        self.told = ToldChoices(self.body.get("n", 1))
        self._usage: dict[str, Any] | None = None
        self._refusal: Refusal | None = None
        self._num_done = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        """What the client has of the first choice."""
        return self.told[0].text

    @property
    def salt(self) -> str:
        """By which taps know it."""
        return str(self.body.get("cache_salt", ""))

    @property
    def is_over(self) -> bool:
        """Whether the client has heard the end."""
        return self._task is not None and self._task.done()

    def start(self) -> "Exchange":
        """Send it."""
        self._task = asyncio.create_task(self._run())
        return self

    async def has(self, event: asyncio.Event) -> bool:
        """Wait for an event of this exchange or its end; return whether it still goes on."""
        assert self._task is not None
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait({waiting, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not self._task.done()

    async def has_tokens(self, count: int, deadline_s: float = 20.0) -> None:
        """Wait until the client has that many tokens."""
        await until(
            lambda: self.text.count(" ") >= count or self.is_over,
            lambda: f"{count} tokens of {self}",
            deadline_s,
        )
        assert self.text.count(" ") >= count, self

    def hang_up(self) -> None:
        """Leave, without waiting for the connection to be closed."""
        assert self._task is not None
        self._task.cancel()

    async def leave(self) -> None:
        """Hang up, and wait until the connection is closed."""
        self.hang_up()
        assert self._task is not None
        await asyncio.gather(self._task, return_exceptions=True)

    async def over(self, deadline_s: float = LONGEST_ANSWER_S) -> Answer | Refusal:
        """Wait for the end. Raises `Hanging` and `Malformed`; then the client has hung up."""
        assert self._task is not None
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        if not done:
            await self.leave()
            raise Hanging(f"neither an end nor an error within {deadline_s} s: {self}")
        self._task.result()
        _must(not self.told.contradiction, f"{self.told.contradiction}: {self}")
        if self._refusal is not None:  # a broken connection may come behind all else
            is_alone = not (self.told.is_whole or self._num_done)
            _must(is_alone or not self._refusal.is_clean, f"more than an error: {self}")
            return self._refusal
        _must(self._num_done == int(bool(self.body.get("stream"))), f"{self._num_done} times [DONE]")
        if not self.told.is_whole or self._usage is None:
            raise Malformed(f"an end of {self.told} with usage {self._usage}")
        return Answer.of(self.told, self._usage)

    def silence_after(self, instant: float) -> float:
        """Return the client's longest wait after `instant` (s) for the next text or the end."""
        times = [instant, *(at for at in (*self.times, self.ended_at) if at is not None and at > instant)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

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
        finally:
            self.ended_at = time.monotonic()

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
            self.times.append(time.monotonic())
            self.has_text.set()
        self._usage = event.get("usage") or self._usage


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Malformed(what)
