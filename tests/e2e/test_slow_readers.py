"""Clients that read a kilobyte per second, and clients that do not read at all, beside one that does.

Memory of a gateway stays flat, workers let go when they have generated, and everybody who reads gets everything.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.observation import Observation
from tests.support.polling import until
from tests.support.slow_client import SlowClient
from tests.support.tiny_models import write_tiny_llama

NUM_SLOW, NUM_STALLED = 40, 5
NUM_TOKENS = 700
TOP_LOGPROBS = 20
SLOWLY = 1024
GENERATED_S, DROPPED_S = 240.0, 150.0
MAX_BYTES_PER_CLIENT = 600 << 10
"""Its answer has 1.7 MB. What it has not read takes 0.15 MB packed, and up to 0.2 MB of events were made ahead."""

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(600)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One worker that does everything, behind one gateway."""
    model = write_tiny_llama(tmp_path / "tiny")
    common = ["--model", str(model), "--served-name", "tiny", "--dtype", "float32", "--kv-memory", "256MiB"]
    running = Cluster(tmp_path / "state", [*common, "--prefill", "0"]).start()
    yield running
    running.stop()


def _body(content: str) -> dict[str, Any]:
    fields = {"stream": True, "logprobs": True, "top_logprobs": TOP_LOGPROBS, "temperature": 0, "ignore_eos": True}
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS} | fields


async def _aborted(cluster: Cluster) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url}/metrics") as answer:
        line = next(line for line in (await answer.text()).splitlines() if line.startswith("tandem_request_aborted_"))
    return int(float(line.split()[1]))


async def test_slow_clients_cost_little_and_get_everything(cluster: Cluster) -> None:
    gateway = psutil.Process(cluster.process("gateway-0")["pid"])
    reference = SlowClient(cluster.port, _body("hello"))
    await reference.ask()
    await reference.read_all()
    assert reference.is_whole
    slow = [SlowClient(cluster.port, _body("hello")) for _ in range(NUM_SLOW)]
    stalled = [SlowClient(cluster.port, _body("hello")) for _ in range(NUM_STALLED)]
    before_bytes, generated = gateway.memory_info().rss, asyncio.Event()
    for client in (*slow, *stalled):
        await client.ask()
    readers = [asyncio.create_task(client.read_slowly(SLOWLY, generated)) for client in slow]
    async with Observation(cluster) as observation:
        started_s = time.monotonic()
        quick = SlowClient(cluster.port, _body("who is quick?"))
        await quick.ask()
        await quick.read_all()
        assert quick.is_whole
        await until(lambda: all(len(client.received) > 100 for client in slow), "every client is served", GENERATED_S)
        await observation.until_idle(GENERATED_S)  # while nearly nothing was read
        grown_bytes = gateway.memory_info().rss - before_bytes
        assert not any(client.is_over for client in slow)
        assert grown_bytes < MAX_BYTES_PER_CLIENT * (NUM_SLOW + NUM_STALLED), grown_bytes

        async def are_dropped() -> bool:
            return await _aborted(cluster) >= NUM_STALLED

        await until(are_dropped, "clients that take nothing are dropped", DROPPED_S, look_s=0.5)
        assert time.monotonic() - started_s < DROPPED_S
    generated.set()
    await asyncio.gather(*readers)
    await asyncio.gather(*(client.read_all() for client in slow))
    assert [client.is_whole for client in slow] == [True] * NUM_SLOW
    assert {client.text for client in slow} == {reference.text}
    assert await _aborted(cluster) == NUM_STALLED
    for client in (reference, quick, *slow, *stalled):
        client.close()
