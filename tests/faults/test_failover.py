"""What must be right across the seam when a stream moves to another decode worker, and what is served without workers
that one would miss."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from common.messages.registry import WorkerHealth
from tests.support.exchange import Answer, Exchange, Refusal
from tests.support.fault_client import asking, completion
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_messages import said_by_decode
from tests.support.fault_rules import Before, Lost, Message
from tests.support.fault_stages import PROBE, Stage, Stager, Undisturbed, about
from tests.support.polling import until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.redis,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]

SPARE = "decode-1"
NUM_TOKENS = 700
SEAM = 30
"""So many tokens has every streaming client when its worker fails."""

FREEZE_S = 8.0
"""Longer than a gateway waits for a sign of life (4 s)."""

MAX_FAILURES = 3
POISON_TOKENS = 1000
"""More than three frames have."""

LEAVE_S = 40.0

THREE = "n: 3"
SOON_OVER = 1
"""The choice of that request which is over before the seam."""

GUIDED = "([12][0-9]{2} ){400,500}"
"""Tokens of three digits."""

SEAM_BODIES: Mapping[str, Mapping[str, Any]] = {
    "greedy": completion(21, 50, max_tokens=NUM_TOKENS, temperature=0, stream=True),
    "seeded": completion(22, 60, max_tokens=NUM_TOKENS, temperature=1.0, top_k=40, min_p=0.02, seed=9, stream=True),
    "penalties": completion(
        23,
        70,
        max_tokens=NUM_TOKENS,
        temperature=0.7,
        seed=4,
        repetition_penalty=1.3,
        presence_penalty=0.9,
        frequency_penalty=0.7,
        stream=True,
    ),
    "whole": completion(24, 80, max_tokens=NUM_TOKENS, temperature=0, frequency_penalty=1.0),
    "chosen end": completion(25, 90, max_tokens=NUM_TOKENS, temperature=0, stream=True),
    "logprobs": completion(27, 55, max_tokens=NUM_TOKENS, temperature=0.9, seed=6, logprobs=5, stream=True),
    THREE: completion(28, 65, max_tokens=NUM_TOKENS, temperature=1.0, seed=12, n=3, stream=True),
    "guided": completion(
        26, 60, max_tokens=NUM_TOKENS, temperature=1.0, seed=5, stream=True, guided_regex=GUIDED, ignore_eos=False
    ),
}


@pytest.mark.parametrize("fault", ["kill -9", "SIGSTOP", "SIGTERM"])
async def test_nothing_differs_across_the_seam(cluster: FaultCluster, fault: str) -> None:
    """Texts, finish reasons and usage: greedy, seeded, with penalties, whole, with logprobs, within a grammar, of
    several choices of which one is over, and with a stop string whose beginning is told before the seam in no case: it
    lies far behind it."""
    bodies = dict(SEAM_BODIES)
    bodies["chosen end"] = {
        **bodies["chosen end"],
        "stop": _late_stop((await _answer(cluster, bodies["chosen end"])).text),
    }
    bodies[THREE] = {**bodies[THREE], "stop": _early_stop(await _answer(cluster, bodies[THREE]))}
    expected = {name: await _answer(cluster, body) for name, body in bodies.items()}
    assert expected["chosen end"].finish_reason == "stop"
    assert [finish for _, finish in expected[THREE].others] == ["stop", "length"]
    assert re.fullmatch(GUIDED, expected["guided"].text)
    asks = await _at_the_seam(cluster, bodies)
    await _strike(cluster, fault)
    answers = {name: await ask.over() for name, ask in asks.items()}
    assert answers == expected
    scored = answers["logprobs"]
    assert isinstance(scored, Answer)
    assert [len(choice) for choice in scored.scored] == [NUM_TOKENS], "not one per token"
    assert scored.is_scored_like(expected["logprobs"])
    moved = [
        ask for ask in asks.values() if cluster.rules.sightings.num_placements[await cluster.tap.id_of(ask.salt)] > 1
    ]
    assert len(moved) == len(asks), "not every stream has moved"


async def test_serves_without_any_prefill_worker(cluster: FaultCluster, plain: Undisturbed) -> None:
    names = [name for name in cluster.shape.workers if name.startswith("prefill")]
    for name in names:
        await cluster.processes[name].end()
        await cluster.until_known_dead(name)
    asks = {name: cluster.ask(body) for name, body in plain.bodies.items()}
    assert {name: await ask.over() for name, ask in asks.items()} == plain.answers


@pytest.mark.usefixtures("one_prefill_worker")
async def test_serves_when_the_only_prefill_worker_dies_for_good(cluster: FaultCluster, plain: Undisturbed) -> None:
    """Those that it was computing, those that come before anybody knows, and those that come later."""
    stager = Stager(cluster, plain)
    victim = await stager.bring(Stage.PREFILLING)
    await cluster.processes["prefill-0"].end()
    early = cluster.ask(plain.bodies[Stage.TRANSFERRING])
    stager.release()
    assert await victim.ask.over() == plain.answers[Stage.PREFILLING]
    assert await early.over() == plain.answers[Stage.TRANSFERRING]
    await cluster.until_known_dead("prefill-0")
    assert await cluster.ask(plain.bodies[PROBE]).over() == plain.answers[PROBE]


async def test_a_request_that_kills_its_workers_ends_and_its_neighbours_do_not(
    cluster: FaultCluster, plain: Undisturbed
) -> None:
    """Whenever a worker has computed a token of it, the worker dies: after three of them it is over."""
    stager = Stager(cluster, plain)
    neighbours = await stager.bystanders("gateway-0")
    poison = asking(cluster.url(), completion(31, 100, max_tokens=POISON_TOKENS, temperature=0, stream=True))
    is_about = about(cluster, poison)
    killed: set[int] = set()  # processes

    def is_of_the_dead(message: Message) -> bool:
        return message.is_frame and cluster.processes[message.link].pid in killed

    def kill(message: Message) -> None:
        killed.add(cluster.processes[message.link].pid)
        cluster.processes[message.link].kill()

    # What a worker has computed before the signal reaches it is lost, too: on a fast machine that is the whole answer.
    cluster.rules.add(Lost(is_of_the_dead), Before(said_by_decode(Stage.DECODING, is_about, b"").next_one, kill))
    supervising = asyncio.create_task(_supervise(cluster))
    try:
        result = await poison.start().over()
        assert isinstance(result, Refusal), result
        assert result.is_clean, result
        assert (result.code, len(killed)) == ("worker_lost", MAX_FAILURES), (result, killed)
        for name, ask in neighbours.items():
            assert await ask.over() == plain.answers[name]
    finally:
        supervising.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


async def _at_the_seam(cluster: FaultCluster, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Exchange]:
    """Start everything on one decode worker, and wait until all that stream have some tokens."""
    cluster.rpc[SPARE].refuses_feeds = True
    await until(lambda: cluster.rpc[SPARE].num_feeds == 0, "the spare worker has no gateway", 10.0)
    asks = {name: cluster.ask(body) for name, body in bodies.items()}
    for name, ask in asks.items():
        if bodies[name].get("stream"):
            await ask.has_tokens(SEAM)
    await until(lambda: asks[THREE].told[SOON_OVER].finish, "one of the choices is over", 20.0)
    assert not any(ask.is_over for ask in asks.values())
    cluster.rpc[SPARE].refuses_feeds = False
    return asks


async def _strike(cluster: FaultCluster, fault: str) -> None:
    """Let the worker that has the streams fail. Asked twice, a worker leaves without finishing them."""
    process = cluster.processes["decode-0"]
    match fault:
        case "kill -9":
            process.kill()
        case "SIGSTOP":
            process.freeze()
            await asyncio.sleep(FREEZE_S)  # the fault itself, not a wait for something
            process.thaw()
        case _:
            process.terminate()
            await until(lambda: _is_leaving(cluster, "decode-0"), "the worker has heard the first signal", 20.0)
            process.terminate()
            assert await process.ended(LEAVE_S) == 0


async def _is_leaving(cluster: FaultCluster, name: str) -> bool:
    """Asked of the worker itself: what the registry hears a heartbeat later may come behind the end of every stream."""
    return await cluster.health_of(name) in (WorkerHealth.DRAINING, "")


async def _supervise(cluster: FaultCluster) -> None:
    """Start again what dies, as a supervisor does."""
    while True:
        for name, process in cluster.processes.items():
            if not process.is_running and name not in cluster.absent:
                await cluster.restart(name)
        await asyncio.sleep(0.1)  # between two looks


async def _answer(cluster: FaultCluster, body: Mapping[str, Any]) -> Answer:
    answer = await cluster.ask(body).over()
    assert isinstance(answer, Answer), answer
    return answer


def _early_stop(answer: Answer) -> str:
    """Return three tokens of the choice that is to be over soon, from before the seam, which no other choice has."""
    texts = [answer.text, *(text for text, _ in answer.others)]
    tokens = texts[SOON_OVER].split()
    for place in range(5, SEAM - 5):
        stop = " ".join(tokens[place : place + 3])
        if not any(stop in text for index, text in enumerate(texts) if index != SOON_OVER):
            return stop
    raise AssertionError("no such place")


def _late_stop(text: str) -> str:
    """Return what ends one of the last tokens and begins the next: a place that is nowhere before."""
    tokens = text.split()
    for place in range(NUM_TOKENS - 100, NUM_TOKENS - 5):
        stop = f"{tokens[place][-1]} {tokens[place + 1]} {tokens[place + 2][0]}"
        if text.index(stop) > len(text) // 2:
            return stop
    raise AssertionError("no such place")
