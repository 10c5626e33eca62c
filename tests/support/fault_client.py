"""A client of a fault cluster: one completion at a time, told token by token, with everything that may go wrong."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.fault_tap import SALT_PREFIX
from tests.support.polling import until
from tests.support.told_choices import Scored, ToldChoices, are_alike

MODEL = "tiny"
LONGEST_ANSWER_S = 60.0
"""A client that has heard neither the end nor an error by then was left hanging."""


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


def completion(first: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a body whose prompt has `num_tokens` ids, told apart by `first`."""
    prompt = [3 + (first + 7 * position + position // 40) % 300 for position in range(num_tokens)]
    return {"model": MODEL, "prompt": prompt, "ignore_eos": True} | fields


@dataclass(eq=False)
class Ask:
    """One request under way: started with `start`, over with `over`."""

    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    salt: str = field(default_factory=lambda: SALT_PREFIX + secrets.token_hex(8))
    told: ToldChoices = field(init=False)
    times: list[float] = field(default_factory=list)
    """When each piece of text came (monotonic)."""
    ended_at: float | None = None
    _usage: dict[str, Any] | None = None
    _refusal: Refusal | None = None
    _num_done: int = 0
    _task: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        self.told = ToldChoices(self.body.get("n", 1))

    @property
    def text(self) -> str:
        """What the client has of the first choice."""
        return self.told[0].text

    def start(self) -> "Ask":
        """Send it."""
        self._task = asyncio.create_task(self._run())
        return self

    def leave(self) -> None:
        """The client hangs up."""
        assert self._task is not None
        self._task.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the client has heard the end."""
        return self._task is not None and self._task.done()

    async def has_tokens(self, count: int, deadline_s: float = 20.0) -> None:
        """Wait until the client has that many tokens."""
        await until(
            lambda: self.text.count(" ") >= count or self.is_over,
            lambda: f"{count} tokens of {self}",
            deadline_s,
        )
        assert self.text.count(" ") >= count, self

    async def over(self, deadline_s: float = LONGEST_ANSWER_S) -> Answer | Refusal:
        """Wait for the end; fail if the client is left hanging or the stream breaks its form."""
        assert self._task is not None
        done, _ = await asyncio.wait({self._task}, timeout=deadline_s)
        assert done, f"a client was left hanging for {deadline_s} s: {self}"
        self._task.result()
        assert not self.told.contradiction, self
        if self._refusal is not None:  # a broken connection may come behind all else
            is_alone = not (self.told.is_whole or self._num_done)
            assert is_alone or not self._refusal.is_clean, f"more than an error: {self}"
            return self._refusal
        assert self.told.is_whole, f"an end without a reason: {self}"
        assert self._usage is not None, f"an end without the usage: {self}"
        assert self._num_done == int(bool(self.body.get("stream"))), f"{self._num_done} times [DONE]: {self}"
        return Answer.of(self.told, self._usage)

    def silence_after(self, instant: float) -> float:
        """Return the client's longest wait after `instant` (s) for the next text or the end."""
        times = [instant, *(at for at in (*self.times, self.ended_at) if at is not None and at > instant)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    async def _run(self) -> None:
        body = {**self.body, "cache_salt": self.salt}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{self.url}/v1/completions", json=body, headers=self.headers) as response,
            ):
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
        assert (self._refusal, self._num_done) == (None, 0), f"{line!r} behind the end of {self}"
        data = line.removeprefix(b"data: ")
        if data == b"[DONE]":
            self._num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self._refusal = Refusal(200, event["error"]["code"] or "")
            return
        self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if self.told.take(event):
            self.times.append(time.monotonic())
        self._usage = event.get("usage") or self._usage
