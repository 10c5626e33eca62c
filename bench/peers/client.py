"""Sends a workload to a server that speaks OpenAI's completions, with the raw client of `bench.gateway`.

It shares the cores with the server, so it keeps bytes and reads them when the measurement is over.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from bench.gateway.client import BrokenAnswer, Connection, EventCounter, Reading
from bench.peers.plan import Ask, Workload
from tandem.bench.outcome import Outcome

PATH = "/v1/completions"
MODEL = "bench"
USAGE = re.compile(rb'"completion_tokens": *(\d+)')


class Client:
    """One server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.idle: list[Connection] = []
        """Kept for the next requests."""

    async def run(self, workload: Workload) -> list[Outcome]:
        """Return what became of each request, in their order."""
        requests = [request_bytes(self._port, ask) for ask in workload.asks]
        gate = asyncio.Semaphore(workload.seats or len(requests))
        start_s = time.monotonic()
        readings = await asyncio.gather(
            *(self._ask(ask, request, start_s, gate) for ask, request in zip(workload.asks, requests, strict=True))
        )
        return [read(ask, *reading) for ask, reading in zip(workload.asks, readings, strict=True)]

    def close(self) -> None:
        """Hang up."""
        while self.idle:
            self.idle.pop().close()

    async def _ask(
        self, ask: Ask, request: bytes, start_s: float, gate: asyncio.Semaphore
    ) -> tuple[float, Reading | BrokenAnswer, bytes]:
        if ask.at_s:
            await asyncio.sleep(start_s + ask.at_s - time.monotonic())
        async with gate, self._connection() as connection:
            arrived_s = start_s + ask.at_s if ask.at_s else time.monotonic()
            try:
                return arrived_s, await connection.ask(request), connection.received
            except BrokenAnswer as error:
                return arrived_s, error, connection.received

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Lend one that is kept from before, unless the server has hung up meanwhile, or a new one."""
        self.idle = [connection for connection in self.idle if connection.is_open]
        connection = self.idle.pop() if self.idle else await Connection.open(self._port, EventCounter())
        yield connection
        self.idle.append(connection)


def request_bytes(port: int, ask: Ask) -> bytes:
    """Return the request of `ask`."""
    body = {
        "model": MODEL,
        "prompt": ask.prompt,
        "max_tokens": ask.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = msgspec.json.encode(body)
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read(ask: Ask, arrived_s: float, reading: Reading | BrokenAnswer, received: bytes) -> Outcome:
    """Return what an answer says; one that was refused or broke off has an error."""
    if isinstance(reading, BrokenAnswer):
        return _broken(ask, arrived_s, reading)
    try:
        times: Sequence[float] = [at for _, at in reading.content_events()]
    except BrokenAnswer as error:
        return _broken(ask, arrived_s, error)
    usages = USAGE.findall(received)
    num_tokens = int(usages[-1]) if usages else len(times)
    ended_s = times[-1] if times else arrived_s
    return Outcome(arrived_s, ended_s, tuple(times), len(ask.prompt), num_tokens)


def _broken(ask: Ask, arrived_s: float, error: BrokenAnswer) -> Outcome:
    return Outcome(arrived_s, arrived_s, (), len(ask.prompt), 0, str(error))
