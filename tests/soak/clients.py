"""The clients of a soak: each asks for one thing after the other, and most wait for the answer."""

import asyncio
import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.soak.catalogue import Catalogue, Entry
from tests.soak.ledger import Ledger
from tests.support.exchange import Answer, Exchange, Hanging, Malformed, Refusal

LONGEST_ANSWER_S = 150.0
"""The deadline of every request (`DEADLINE_S`), a gateway frozen for 15 s, and as long again."""

DEADLINE_S = 90.0
CANCEL_S = 5.0
MAX_REPEATS = 20
REPEAT_PAUSE_S = 1.0
UNCACHED = 0.7
"""Share of the requests whose prompt nobody has in a cache."""

RIGHT = "right answer"


class Manner(enum.StrEnum):
    """How a client behaves."""

    STAYS = "stays"
    TWINS = "asks twice at once"
    LEAVES_EARLY = "leaves before the first token"
    LEAVES = "leaves amid the answer"
    HURRIES = "has a short deadline"
    CANCELS = "cancels by id"


WEIGHTS = {
    Manner.STAYS: 62,
    Manner.TWINS: 10,
    Manner.LEAVES_EARLY: 7,
    Manner.LEAVES: 8,
    Manner.HURRIES: 6,
    Manner.CANCELS: 7,
}


@dataclass(frozen=True)
class World:
    """What all clients share. `gateways`: addresses by name."""

    catalogue: Catalogue
    ledger: Ledger
    gateways: dict[str, str]
    rpc_address: str
    stopping: asyncio.Event


@dataclass(frozen=True)
class Try:
    """One request of one client, as it was sent."""

    entry: Entry
    gateway: str
    exchange: Exchange
    began: float = field(default_factory=time.monotonic)


class Client:
    """One of them; what it does follows from its seed and from what it gets."""

    def __init__(self, number: int, seed: int, world: World) -> None:
        self._random = Random(f"{seed} client {number}")
        self._world = world

    async def run(self) -> None:
        """Ask until told to stop; what is under way then is waited for."""
        while not self._world.stopping.is_set():
            entry = self._random.choice(self._world.catalogue.entries)
            manner = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            await self._ask(entry, manner)

    async def _ask(self, entry: Entry, manner: Manner) -> None:
        match manner:
            case Manner.STAYS:
                await self._insist(entry)
            case Manner.TWINS:
                await asyncio.gather(self._insist(entry), self._insist(entry))
            case Manner.LEAVES_EARLY:
                await self._leave(self._send(entry), self._random.uniform(0.0, 0.8))
            case Manner.LEAVES:
                attempt = self._send(entry)
                await attempt.exchange.has(attempt.exchange.has_text if entry.streams else attempt.exchange.has_head)
                await self._leave(attempt, self._random.uniform(0.0, 1.0))
            case Manner.HURRIES:
                await self._settle(self._send(entry, deadline_ms=self._random.randint(20, 4000)), "deadline_exceeded")
            case Manner.CANCELS:
                await self._cancel(self._send(entry))

    def _send(self, entry: Entry, deadline_ms: int | None = None) -> Try:
        gateway = self._random.choice(sorted(self._world.gateways))
        headers = {} if deadline_ms is None else {"x-request-deadline-ms": str(deadline_ms)}
        exchange = Exchange(self._world.gateways[gateway], entry.path, self._salted(entry), headers)
        return Try(entry, gateway, exchange.start())

    def _salted(self, entry: Entry) -> Mapping[str, Any]:
        """Return the body, mostly with a salt of its own: a prompt that is cached everywhere is never handed over."""
        if "cache_salt" in entry.body or self._random.random() >= UNCACHED:
            return entry.body
        return {**entry.body, "cache_salt": self._random.randbytes(8).hex()}

    async def _insist(self, entry: Entry) -> None:
        """Ask again, at any gateway, until the answer is there, as clients do that are told to come again."""
        for _ in range(MAX_REPEATS):
            if await self._settle(self._send(entry)) or self._world.stopping.is_set():
                return
            await asyncio.sleep(REPEAT_PAUSE_S * self._random.uniform(0.3, 1.0))  # as told by Retry-After
        self._world.ledger.wrong("no answer", f"{entry.name}: {MAX_REPEATS} times")

    async def _leave(self, attempt: Try, after_s: float) -> None:
        await asyncio.sleep(after_s)  # how long this client waits
        await attempt.exchange.leave()
        if not self._expected(attempt).begins_with(attempt.exchange.told):
            self._wrong(attempt, "wrong tokens", f"left with {attempt.exchange.told}")
        self._world.ledger.outcomes["client left"] += 1

    async def _cancel(self, attempt: Try) -> None:
        exchange = attempt.exchange
        if await exchange.has(exchange.has_head) and exchange.request:
            await asyncio.sleep(self._random.uniform(0.0, 0.5))  # how long this client waits
            try:
                async with grpc.aio.insecure_channel(self._world.rpc_address) as channel:
                    await GenerationStub(channel).Cancel(pb.CancelRequest(id=exchange.request), timeout=CANCEL_S)
            except grpc.aio.AioRpcError as error:
                self._world.ledger.outcomes[f"cancel call: {error.code().name.lower()}"] += 1
                self._judge_call(attempt, error)
        await self._settle(attempt, "request_cancelled")

    def _judge_call(self, attempt: Try, error: grpc.aio.AioRpcError) -> None:
        if not self._world.ledger.may_fail(attempt.began, time.monotonic()):
            self._wrong(attempt, "cancel call failed", f"{error.code()}: {error.details()}")

    async def _settle(self, attempt: Try, allowed_code: str | None = None) -> bool:
        """Wait for the end and judge it; return whether this client need not ask again."""
        try:
            result = await attempt.exchange.over(LONGEST_ANSWER_S)
        except (Hanging, Malformed) as error:
            self._wrong(attempt, "hung" if isinstance(error, Hanging) else "malformed", str(error))
            return True
        if isinstance(result, Answer):
            self._judge_answer(attempt, result)
            return True
        self._judge_refusal(attempt, result, allowed_code)
        return False

    def _judge_answer(self, attempt: Try, answer: Answer) -> None:
        expected = self._expected(attempt)
        if answer == expected and answer.is_scored_like(expected):
            self._world.ledger.outcomes[RIGHT] += 1
            self._world.ledger.entries[attempt.entry.name] += 1
        else:
            self._wrong(attempt, "wrong answer", f"expected {expected}\n     got {answer}")

    def _judge_refusal(self, attempt: Try, refusal: Refusal, allowed_code: str | None) -> None:
        ledger, now = self._world.ledger, time.monotonic()
        name = f"{refusal.status} {refusal.code}" if refusal.is_clean else "connection broken"
        ledger.outcomes[name] += 1
        if not self._expected(attempt).begins_with(attempt.exchange.told):
            self._wrong(attempt, "wrong tokens", f"before {name}: {attempt.exchange.told}")
        if refusal.status == 503 and refusal.retry_after is None:
            self._wrong(attempt, "no Retry-After", name)
        if not refusal.is_clean:
            is_answered = attempt.exchange.has_head.is_set()
            if not ledger.may_break(attempt.gateway, attempt.began, now, is_answered=is_answered):
                self._wrong(attempt, "connection broken", refusal.code)
        elif refusal.code != allowed_code and not ledger.may_fail(attempt.began, now):
            self._wrong(attempt, "error without a fault", name)

    def _expected(self, attempt: Try) -> Answer:
        return self._world.catalogue.answers[attempt.entry.name]

    def _wrong(self, attempt: Try, what: str, detail: str) -> None:
        ledger, now = self._world.ledger, time.monotonic()
        began_s = attempt.began - ledger.started
        where = f"{attempt.entry.name} at {attempt.gateway}, request {attempt.exchange.request or 'unknown'}"
        text = attempt.exchange.text
        ledger.wrong(
            what,
            f"{where}, from {began_s:.1f} s on\n{detail}\ntext so far: {text!r}\n"
            f"faults: {ledger.around(attempt.began, now) or 'none'}",
        )
