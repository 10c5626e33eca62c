"""Clients that never pause: each asks again and again, and compares every answer with the undisturbed one."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATIENCE = aiohttp.ClientTimeout(total=None, sock_read=60)


@dataclass(frozen=True)
class Kind:
    """How a client asks: streaming or not, on one kept-alive connection or on a new one every time."""

    streams: bool
    keeps_alive: bool


KINDS = tuple(Kind(streams, keeps_alive) for streams in (True, False) for keeps_alive in (True, False))


@dataclass
class Load:
    """What the clients have seen so far."""

    url: str
    bodies: Sequence[dict[str, Any]]
    expected: list[str] = field(default_factory=list)
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)
    """Whatever was not exactly the undisturbed answer."""

    async def learn(self) -> None:
        """Ask for the undisturbed answers."""
        async with aiohttp.ClientSession(timeout=PATIENCE) as session:
            self.expected = [await ask(session, self.url, body, streams=False) for body in self.bodies]

    @contextlib.asynccontextmanager
    async def running(self, kinds: Sequence[Kind], *, pause_s: float = 0.0) -> AsyncIterator[None]:
        """Keep one client of each kind busy; when the block is left each gets its last answer. `pause_s` is how long a
        client thinks between two requests.
        """
        over = asyncio.Event()
        clients = [asyncio.create_task(self._client(kind, first, over, pause_s)) for first, kind in enumerate(kinds)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*clients)

    async def _client(self, kind: Kind, first: int, over: asyncio.Event, pause_s: float) -> None:
        connector = aiohttp.TCPConnector(force_close=not kind.keeps_alive)
        async with aiohttp.ClientSession(connector=connector, timeout=PATIENCE) as session:
            for turn in itertools.count(first):
                which = turn % len(self.bodies)
                await self._check(session, kind, which)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), pause_s)
                if over.is_set():
                    return

    async def _check(self, session: aiohttp.ClientSession, kind: Kind, which: int) -> None:
        try:
            text = await ask(session, self.url, self.bodies[which], streams=kind.streams)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, AssertionError) as error:
            self.wrong.append(f"{kind}: {type(error).__name__} {error}")
            return
        self.num_answers += 1
        if text != self.expected[which]:
            self.wrong.append(f"{kind}: {text!r} instead of {self.expected[which]!r}")


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], *, streams: bool) -> str:
    """Return the text of one completion; fail on any error and on a stream that does not end in order."""
    async with session.post(f"{url}/v1/completions", json=body | {"stream": streams}) as response:
        content = await response.read()
        assert response.status == 200, (
            f"{response.status}, retry after {response.headers.get('Retry-After')}: {content!r}"
        )
    if not streams:
        answer: str = json.loads(content)["choices"][0]["text"]
        return answer
    assert content.endswith(b"data: [DONE]\n\n"), content[-300:]
    lines = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: {")]
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events), events[-1]
    return "".join(choice["text"] for event in events for choice in event["choices"])
