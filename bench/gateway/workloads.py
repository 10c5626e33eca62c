"""What is measured of one router: a load, and the figures that it yields.

Nothing counts that was not whole: every answer is compared with the script, token by token, when its time is over.
"""

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.gateway.breaks import notice_ms, tells_of_death
from bench.gateway.client import Connection, EventCounter, Reading, request_bytes
from bench.gateway.pacing import Pacer
from bench.gateway.processes import Measured
from bench.gateway.script import Script

Figures = dict[str, float]
"""By name, with the unit in it."""

HEAD_EVENTS = 1
"""The role comes in an event of its own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    fast_streams: int = 64
    fast_tokens: int = 512
    fast_answers: int = 16
    fast_s: float = 6.0
    paced_streams: int = 1000
    paced_tokens: int = 500
    interval_s: float = 0.02
    ramp_s: float = 4.0
    lone_requests: int = 300
    lone_tokens: int = 8
    short_connections: int = 64
    short_s: float = 4.0


QUICK = Sizes(
    fast_streams=4,
    fast_tokens=64,
    fast_s=0.3,
    paced_streams=8,
    paced_tokens=40,
    ramp_s=0.1,
    lone_requests=5,
    short_connections=2,
    short_s=0.3,
)


@dataclass
class Target:
    """Who is asked: at `port`, paid for by `process` (None: nobody but this process)."""

    label: str
    port: int
    process: Measured | None = None
    kill: Callable[[], Awaitable[None]] | None = None
    """Lets what stands behind it die; of the gateway for good."""
    until_ready: Callable[[], Awaitable[None]] | None = None
    """Waits until it can serve: a pause of the machine may have cost it its upstream."""
    figures: dict[str, list[Figures]] = field(default_factory=dict)
    """Of each workload, in the order of the rounds."""


class Bench:
    """Runs workloads, one at a time. The pacer is the one of worker and upstream alike."""

    def __init__(self, script: Script, pacer: Pacer, sizes: Sizes) -> None:
        self._script = script
        self._pacer = pacer
        self._sizes = sizes
        self._seeds = itertools.count(1)

    @property
    def workloads(self) -> dict[str, Callable[[Target], Awaitable[Figures]]]:
        """By name."""
        return {
            "fast": self._fast,
            "paced": self._paced,
            "lone": self._lone,
            "short": self._short,
            "breaks": self._breaks,
        }

    async def run(self, name: str, target: Target) -> None:
        """Run a workload against a target and keep its figures there; raises `BrokenAnswer`."""
        gc.collect()
        if target.until_ready is not None:
            await target.until_ready()
        self._pacer.start(self._sizes.interval_s if name == "paced" else None)
        try:
            figures = await self.workloads[name](target)
        finally:
            self._pacer.stop()
        target.figures.setdefault(name, []).append(figures)

    async def _fast(self, target: Target) -> Figures:
        """As many events as it passes on, of streams that are written as fast as they are taken."""
        sizes, counter = self._sizes, EventCounter()
        readings: list[Reading] = []
        async with _connections(target.port, sizes.fast_streams, counter) as connections:
            until_s = time.monotonic() + sizes.fast_s
            began_s, cpu_s = time.monotonic(), _cpu_s(target)
            clients = [self._repeat(one, target, until_s, sizes.fast_tokens, readings) for one in connections]
            await asyncio.gather(*clients)
            duration_s, cpu_s = time.monotonic() - began_s, _cpu_s(target) - cpu_s
        pieces = self._script.pieces[: sizes.fast_tokens]
        arrivals = await asyncio.to_thread(_read, readings, pieces)
        num_events = sum(reading.num_events for reading in readings)
        return {
            "events_per_s": num_events / duration_s,
            "tokens_per_s": sum(map(len, arrivals)) / duration_s,
            "cpu_us_per_event": cpu_s / num_events * 1e6,
        }

    async def _repeat(
        self, connection: Connection, target: Target, until_s: float, num_tokens: int, readings: list[Reading]
    ) -> None:
        for _ in range(self._sizes.fast_answers):
            readings.append(await connection.ask(request_bytes(target.port, num_tokens, next(self._seeds))))
            if time.monotonic() >= until_s:
                break

    async def _paced(self, target: Target) -> Figures:
        """How late tokens come, and what they cost, with many streams at a steady rate."""
        sizes, counter = self._sizes, EventCounter()
        seeds = list(itertools.islice(self._seeds, sizes.paced_streams))
        async with _connections(target.port, sizes.paced_streams, counter) as connections:
            asking = []
            for connection, seed in zip(connections, seeds, strict=True):
                request = request_bytes(target.port, sizes.paced_tokens, seed)
                asking.append(asyncio.create_task(connection.ask(request)))
                await asyncio.sleep(sizes.ramp_s / sizes.paced_streams)
            window = Window(target, counter)
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            window.close()
            readings = await asyncio.gather(*asking)
        arrivals = await asyncio.to_thread(_read, readings, self._script.pieces[: sizes.paced_tokens])
        late_s = [
            arrived_s - written_s
            for seed, arrived in zip(seeds, arrivals, strict=True)
            for written_s, arrived_s in zip(self._pacer.written_s[seed], arrived, strict=True)
            if window.has(written_s)
        ]
        return {**_quantiles_ms(late_s), **window.figures()}

    async def _lone(self, target: Target) -> Figures:
        """How long the first token takes when nothing else is going on."""
        sizes, counter = self._sizes, EventCounter()
        pieces = self._script.pieces[: sizes.lone_tokens]
        first_s = []
        async with _connections(target.port, 1, counter) as (connection,):
            for seed in itertools.islice(self._seeds, sizes.lone_requests):
                reading = await connection.ask(request_bytes(target.port, sizes.lone_tokens, seed))
                first_s.append(reading.tokens(pieces)[0] - reading.asked_s)
        return {"ttft_p50_ms": statistics.median(first_s) * 1e3}

    async def _short(self, target: Target) -> Figures:
        """How many requests of one token are answered."""
        sizes, counter = self._sizes, EventCounter()
        readings: list[Reading] = []
        text = self._script.text(1)

        async def repeat(connection: Connection) -> None:
            while True:
                request = request_bytes(target.port, 1, next(self._seeds), streams=False)
                readings.append(await connection.ask(request))
                if time.monotonic() >= until_s:
                    break

        async with _connections(target.port, sizes.short_connections, counter) as connections:
            until_s = time.monotonic() + sizes.short_s
            began_s, cpu_s = time.monotonic(), _cpu_s(target)
            await asyncio.gather(*map(repeat, connections))
            duration_s, cpu_s = time.monotonic() - began_s, _cpu_s(target) - cpu_s
        for reading in readings:
            reading.check_whole(text)
        return {"requests_per_s": len(readings) / duration_s, "cpu_us_per_request": cpu_s / len(readings) * 1e6}

    async def _breaks(self, target: Target) -> Figures:
        """What happens when a client leaves, and when the upstream dies."""
        figures = {"notice_ms": await notice_ms(target.port, self._pacer, next(self._seeds))}
        self._pacer.start(self._sizes.interval_s)
        if target.kill is not None:
            figures["error_events"] = float(await tells_of_death(target.port, next(self._seeds), target.kill))
        return figures


class Window:
    """The time while every stream runs."""

    def __init__(self, target: Target, counter: EventCounter) -> None:
        self._target = target
        self._counter = counter
        self._began_s = time.monotonic()
        self._ended_s = self._began_s
        self._cpu_s = _cpu_s(target)
        self._num_events = counter.num_events
        self._rss_mib = 0.0

    def close(self) -> None:
        """Some stream has ended."""
        self._ended_s = time.monotonic()
        self._cpu_s = _cpu_s(self._target) - self._cpu_s
        self._num_events = self._counter.num_events - self._num_events
        self._rss_mib = self._target.process.rss_mib() if self._target.process is not None else 0.0

    def has(self, at_s: float) -> bool:
        """Whether that moment lies in it."""
        return self._began_s <= at_s < self._ended_s

    def figures(self) -> Figures:
        """Return what was used while it was open."""
        return {
            "events_per_s": self._num_events / (self._ended_s - self._began_s),
            "cpu_us_per_event": self._cpu_s / max(self._num_events, 1) * 1e6,
            "rss_mib": self._rss_mib,
        }


@asynccontextmanager
async def _connections(port: int, number: int, counter: EventCounter) -> AsyncIterator[list[Connection]]:
    connections = [await Connection.open(port, counter) for _ in range(number)]
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()


def _read(readings: Sequence[Reading], pieces: Sequence[str]) -> list[list[float]]:
    """Check answers, in a thread: the scripted worker has to show that it lives meanwhile."""
    return [reading.tokens(pieces) for reading in readings]


def _cpu_s(target: Target) -> float:
    return 0.0 if target.process is None else target.process.cpu_s()


def _quantiles_ms(late_s: Sequence[float]) -> Figures:
    cuts = statistics.quantiles(late_s, n=100)
    return {"late_p50_ms": cuts[49] * 1e3, "late_p99_ms": cuts[98] * 1e3}
