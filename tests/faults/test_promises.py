"""Promises with numbers: how long a stream pauses when a worker dies, and how soon abandoned prefills make room."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import pytest

from tests.support.exchange import Answer
from tests.support.fault_cells import Scene, holder_of
from tests.support.fault_client import completion
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_stages import Stage, Undisturbed
from tests.support.fault_table import Table, Target
from tests.support.polling import until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

ROUNDS = 3
RESUME_S = 2.0
LEASE_S = 6.0
"""The default of --lease-s."""

NUM_ABANDONED = 10
LONG_PROMPT = 1900
SHORT_PROMPT = 24
CANCEL_MARGIN_S = 0.1
BOUND_S = 20.0


async def test_a_stream_resumes_within_2_s_when_its_decode_worker_is_killed(
    cluster: FaultCluster, plain: Undisturbed, table: Table
) -> None:
    pauses = []
    for _ in range(ROUNDS):
        scene = Scene(cluster, plain, Table(), "kill -9", "decode", BOUND_S)
        await scene.stage([Stage.DECODING])
        name = holder_of(cluster, scene.victims, "decode")
        victim = scene.victims[0].ask
        num_shown = victim.text.count(" ")
        await scene.strike(cluster.processes[name].kill)
        await scene.settle()
        recompute_s = await _time_to_first_token(cluster, len(victim.body["prompt"]) + num_shown)
        pauses.append((victim.silence_after(scene.struck_at), RESUME_S + recompute_s))
        await cluster.restart(name)
        await scene.at_rest()
    worst_s, allowed_s = max(pauses, key=lambda pause: pause[0] - pause[1])
    table.targets.append(Target("decode worker killed: the stream resumes", worst_s, allowed_s))
    assert worst_s <= allowed_s, pauses


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.PREFILLING, Stage.TRANSFERRING, Stage.COMMITTING])
async def test_a_request_goes_on_within_the_lease_when_its_prefill_worker_is_killed(
    cluster: FaultCluster, plain: Undisturbed, table: Table, stage: Stage
) -> None:
    scene = Scene(cluster, plain, Table(), "kill -9", "prefill", BOUND_S)
    await scene.stage([stage])
    name = holder_of(cluster, scene.victims, "prefill")
    await scene.strike(cluster.processes[name].kill)
    await scene.settle()
    pause_s = scene.victims[0].ask.silence_after(scene.struck_at)
    table.targets.append(Target(f"prefill worker killed, {stage}: the request goes on", pause_s, LEASE_S))
    await cluster.restart(name)
    await scene.at_rest()
    assert pause_s <= LEASE_S


@pytest.mark.usefixtures("one_prefill_worker")
async def test_a_short_request_behind_10_abandoned_prefills_waits_for_one_chunk(
    cluster: FaultCluster, table: Table
) -> None:
    """The gateway may still send its cancels one after the other: they count."""
    await cluster.until_ready()
    idle_s = statistics.median([await _time_to_first_token(cluster, SHORT_PROMPT) for _ in range(ROUNDS)])
    long_s = await _time_to_first_token(cluster, LONG_PROMPT)
    chunk_s = long_s / (LONG_PROMPT // 32)
    waits = []
    for _ in range(ROUNDS):
        await cluster.until_idle()
        long_ones = [cluster.ask(completion(number, LONG_PROMPT, max_tokens=2)) for number in range(NUM_ABANDONED)]
        requests = [await cluster.tap.id_of(ask.salt) for ask in long_ones]
        await until(
            partial(_is_any_begun, cluster, requests),
            "a prefill has begun",
            20.0,
        )
        for ask in long_ones:
            ask.hang_up()
        waits.append(await _time_to_first_token(cluster, SHORT_PROMPT))
    allowed_s = idle_s + chunk_s + CANCEL_MARGIN_S
    wait_s = statistics.median(waits)
    table.targets.append(Target("first token of a short request behind 10 abandoned prefills", wait_s, allowed_s))
    await cluster.until_idle()
    assert wait_s <= allowed_s, (waits, idle_s, chunk_s)


async def _time_to_first_token(cluster: FaultCluster, num_tokens: int) -> float:
    ask = cluster.ask(completion(9, num_tokens, max_tokens=2, temperature=0, stream=True))
    started = time.monotonic()
    assert isinstance(await ask.over(), Answer)
    return ask.times[0] - started


def _is_any_begun(cluster: FaultCluster, requests: Sequence[str]) -> bool:
    return any(request in cluster.rules.sightings.prefill for request in requests)
