"""The stages of a request's life, and how one is held at each: by a gate that its own messages come to."""

import asyncio
import enum
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.exchange import Answer, Exchange
from tests.support.fault_client import asking, completion
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_rules import After, Before, Gate, Message, Nth

CHUNK = 3
"""Which chunk of the prompt the victim of that stage is held behind."""

REACH_S = 15.0

LONGEST_HOLD_S = 1.6
"""Whose message is held waits 2 s for the answer."""


IsMine = Callable[[Message, str], bool]
"""Whether a message with that method is about the request at hand."""


class Stage(enum.StrEnum):
    """Where a fault finds a request. In this order they can be held side by side by one prefill worker: the page link
    is held for all, and a claim that is not answered keeps it from claiming more."""

    DECODING = "decoding"
    COMMITTING = "before commit"
    TRANSFERRING = "transferring"
    PREFILLING = f"prefilling chunk {CHUNK}"
    QUEUED = "queued"


ALL_STAGES = tuple(Stage)
BYSTANDERS = ("bystander that streams", "bystander that does not")
PROBE = "probe"

BODIES: Mapping[str, Mapping[str, Any]] = {
    Stage.DECODING: completion(
        5, 100, max_tokens=850, temperature=0.8, seed=11, presence_penalty=0.6, repetition_penalty=1.1, stream=True
    ),
    Stage.COMMITTING: completion(4, 90, max_tokens=60, temperature=1.0, top_p=0.9, seed=7),
    Stage.TRANSFERRING: completion(3, 170, max_tokens=60, temperature=0, stream=True),
    Stage.PREFILLING: completion(
        2, 230, max_tokens=60, temperature=0.9, seed=5, frequency_penalty=0.5, repetition_penalty=1.2, stream=True
    ),
    Stage.QUEUED: completion(1, 150, max_tokens=60, temperature=0, frequency_penalty=0.4, stream=True),
    BYSTANDERS[0]: completion(6, 60, max_tokens=700, temperature=0, stream=True),
    BYSTANDERS[1]: completion(7, 45, max_tokens=700, temperature=0.7, seed=3),
    PROBE: completion(8, 40, max_tokens=4, temperature=0),
}


@dataclass(frozen=True)
class Undisturbed:
    """What each body gets when nothing happens. The greedy victim of the transfer also has a stop string, which begins
    in the middle of one token and ends in the middle of another."""

    bodies: Mapping[str, Mapping[str, Any]]
    answers: Mapping[str, Answer]


async def undisturbed(cluster: FaultCluster) -> Undisturbed:
    """Ask for everything once, one after the other."""
    bodies = dict(BODIES)
    free = await _answer(cluster, bodies[Stage.TRANSFERRING])
    bodies[Stage.TRANSFERRING] = {**bodies[Stage.TRANSFERRING], "stop": _stop_string(free.text)}
    answers = {name: await _answer(cluster, body) for name, body in bodies.items()}
    assert answers[Stage.TRANSFERRING].finish_reason == "stop"
    assert free.text.startswith(answers[Stage.TRANSFERRING].text)
    return Undisturbed(bodies, answers)


@dataclass(eq=False)
class Victim:
    """A request that is held at a stage."""

    stage: Stage
    ask: Exchange
    release: Callable[[], None]
    request: str = ""


@dataclass(eq=False)
class Stager:
    """Brings requests to their stages in one cluster. `gateway`: where the victims ask."""

    cluster: FaultCluster
    plain: Undisturbed
    gateway: str = "gateway-0"
    victims: list[Victim] = field(default_factory=list)

    async def bystanders(self, gateway: str) -> dict[str, Exchange]:
        """Start the requests that the fault must not touch; they decode."""
        asks = {name: self.cluster.ask(self.plain.bodies[name], gateway) for name in BYSTANDERS}
        await asks[BYSTANDERS[0]].has_tokens(3)
        return asks

    async def bring_all(self, stages: Sequence[Stage]) -> bool:
        """Bring one request to each stage; return whether all of them stand there at the same time."""
        first_held: float | None = None
        for stage in Stage:
            if stage in stages:
                await self.bring(stage)
                if first_held is None and stage is not Stage.DECODING:
                    first_held = time.monotonic()
        held_s = 0.0 if first_held is None else time.monotonic() - first_held
        return held_s < LONGEST_HOLD_S and not any(victim.ask.is_over for victim in self.victims)

    async def bring(self, stage: Stage) -> Victim:
        """Start a request and return once it is held at `stage`."""
        ask = asking(self.cluster.url(self.gateway), self.plain.bodies[stage])
        reached, release = hold_at(self.cluster, stage, about(self.cluster, ask))
        ask.start()
        victim = Victim(stage, ask, release)
        self.victims.append(victim)
        victim.request = await self.cluster.tap.id_of(ask.salt)
        if reached is None:
            await ask.has_tokens(3)
        else:
            await _within(reached, f"a request is {stage}: {ask}")
        return victim

    def release(self) -> None:
        """Let every victim go on."""
        for victim in self.victims:
            victim.release()


def about(cluster: FaultCluster, ask: Exchange) -> IsMine:
    """Return what tells whether a message with some method is about the request."""
    tap = cluster.tap

    def is_mine(message: Message, method: str) -> bool:
        return message.method == method and any(tap.salt_of(request) == ask.salt for request in message.requests)

    return is_mine


def hold_at(cluster: FaultCluster, stage: Stage, is_mine: IsMine) -> tuple[asyncio.Event | None, Callable[[], None]]:
    """Set up the gate of a stage; return what tells that it is reached (None: the client does), and what opens it."""
    match stage:
        case Stage.QUEUED:
            gate = Gate(lambda message: is_mine(message, "Bind"))
        case Stage.PREFILLING:
            gate = Gate(Nth(lambda message: is_mine(message, "Announce"), CHUNK))
        case Stage.COMMITTING:
            gate = Gate(lambda message: is_mine(message, "Commit"))
        case Stage.TRANSFERRING:
            return _hold_pages(cluster, is_mine)
        case Stage.DECODING:
            return None, _nothing
    cluster.rules.add(gate)
    return gate.seen, gate.open


def _hold_pages(cluster: FaultCluster, is_mine: IsMine) -> tuple[asyncio.Event, Callable[[], None]]:
    """Hold the pages from the first announcement on: the transfer is all that is missing after the commit."""

    def hold(message: Message) -> None:
        cluster.page_link(cluster.rules.sightings.prefill[message.requests[0]]).hold()

    def heal() -> None:
        for link in cluster.pages.values():
            link.heal()

    committed = After(lambda message: is_mine(message, "Commit"))
    cluster.rules.add(Before(Nth(lambda message: is_mine(message, "Announce")), hold), committed)
    return committed.passed, heal


def _stop_string(text: str) -> str:
    """Return what stands from the last digit of the 30th token to the first of the 32nd."""
    tokens = text.split()
    return f"{tokens[29][-1]} {tokens[30]} {tokens[31][0]}"


async def _answer(cluster: FaultCluster, body: Mapping[str, Any]) -> Answer:
    answer = await cluster.ask(body).over()
    assert isinstance(answer, Answer), answer
    return answer


async def _within(event: asyncio.Event, what: str) -> None:
    try:
        async with asyncio.timeout(REACH_S):
            await event.wait()
    except TimeoutError as error:
        raise AssertionError(f"not within {REACH_S} s: {what}") from error


def _nothing() -> None:
    """There is no gate."""
