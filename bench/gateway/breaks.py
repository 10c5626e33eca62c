"""What a router does when something breaks: a client that leaves while nothing flows, an upstream that dies."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from bench.gateway.client import BrokenAnswer, Connection, EventCounter, request_bytes
from bench.gateway.pacing import Pacer

STALL_S = 3600.0
"""Nothing flows for so long, as in a long prefill."""

NOTICE_S = 8.0
"""So long is waited for a router to notice."""

NUM_TOKENS = 400
NUM_BEFORE_DEATH = 5
LOOK_S = 0.001
DEADLINE = "x-request-deadline-ms: 2000\r\n"
"""How long ours may look for another worker; others ignore it."""


async def notice_ms(port: int, pacer: Pacer, seed: int) -> float:
    """Return how long it takes until the upstream knows that a client has left; `NOTICE_S` if it does not."""
    pacer.start(STALL_S)
    connection = await Connection.open(port, EventCounter())
    asking = asyncio.create_task(connection.ask(request_bytes(port, NUM_TOKENS, seed)))
    await _until(lambda: pacer.has(seed))
    left_s = time.monotonic()
    connection.close()
    await _until(lambda: not pacer.has(seed))
    with suppress(BrokenAnswer):
        await asking
    return (pacer.removed_s.get(seed, left_s + NOTICE_S) - left_s) * 1e3


async def tells_of_death(port: int, seed: int, kill: Callable[[], Awaitable[None]]) -> bool:
    """Return whether a client is told, by an error event and no `[DONE]`, that its upstream has died in the middle."""
    counter = EventCounter()
    connection = await Connection.open(port, counter)
    asking = asyncio.create_task(connection.ask(request_bytes(port, NUM_TOKENS, seed, headers=DEADLINE)))
    await _until(lambda: counter.num_events > NUM_BEFORE_DEATH)
    await kill()
    with suppress(BrokenAnswer, TimeoutError):
        async with asyncio.timeout(NOTICE_S):
            await asking
    connection.close()
    return b'data: {"error"' in connection.received and b"[DONE]" not in connection.received


async def _until(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + NOTICE_S
    while not holds() and time.monotonic() < give_up_at:  # noqa: ASYNC110 - the least that disturbs what is measured
        await asyncio.sleep(LOOK_S)
