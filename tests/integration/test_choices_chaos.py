"""Many requests with several choices on small pools, while copies stall, prefill workers die and come back, clients
have enough of a choice or leave, and placements are lost or given back: each choice that somebody wants gets the tokens
and the logprobs that it would get alone, across all its placements, and in the end nothing is held anywhere.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
import pytest

import decode_worker.receiver
from common.rpc.logprobs import logprobs_of
from decode_worker.worker import DecodeWorker
from proto import worker_pb2 as pb
from tests.support.feed_client import FeedClient, make_choices
from tests.support.likelihoods import likelihood
from tests.support.polling import turns, until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, Node, puller, running_fabric

NUM_REQUESTS = 30
RETRYABLE = {"displaced", "preempted", "stale"}


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    monkeypatch.setattr(decode_worker.receiver, "BIND_TIMEOUT_S", 0.5)
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@dataclass
class Told:
    """What a client has of one choice."""

    expected: list[int]
    shown: list[int] = field(default_factory=list)
    is_open: bool = True


class Request:
    """One request as its gateway sees it: it reads what comes of the current placement, and continues a lost one."""

    def __init__(self, client: FeedClient, decode: Node[DecodeWorker], name: str, dice: random.Random) -> None:
        self._client = client
        self._decode = decode
        self._name = name
        self._dice = dice
        self._prompt = [dice.randrange(3) for _ in range(dice.choice([1, 4, 8, 9, 17, 30]))]
        self._max_tokens = dice.choice([1, 2, 9, 24])
        stop_ids = range(0, 997, 9) if dice.random() < 0.3 else ()
        self._stop_ids = tuple(stop_ids)
        self._asks = dice.random() < 0.3
        self._lacks_prompt = self._asks and len(self._prompt) > 1
        self.choices = {
            choice: Told(answer(self._prompt, self._max_tokens, stop_ids, choice))
            for choice in range(dice.choice([1, 2, 3, 4]))
        }
        self._placement = 0
        self._num_lost = 0
        """The newest placement that was given up."""

    async def live(self) -> None:
        """Go on until every choice has ended, or the client has left."""
        leaving = asyncio.create_task(self._lose_interest())
        try:
            while self._open:
                await self._place()
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    @property
    def _open(self) -> dict[int, Told]:
        return {choice: told for choice, told in self.choices.items() if told.is_open}

    async def _place(self) -> None:
        self._placement += 1
        job = make_choices(
            self._name,
            self._prompt,
            {choice: told.shown for choice, told in self._open.items()},
            placement=self._placement,
            max_tokens=self._max_tokens,
            stop_ids=self._stop_ids,
            num_logprobs=0 if self._asks else None,
            num_prompt_logprobs=0 if self._lacks_prompt else None,
        )
        job = msgspec.structs.replace(job, runs_alone=self._dice.random() < 0.1)
        await self._client.place(job, self._decode.record)
        losing = asyncio.create_task(self._lose(self._placement))
        try:
            await self._follow(self._client.events[self._name, self._placement])
        finally:
            losing.cancel()
            await asyncio.gather(losing, return_exceptions=True)

    async def _lose(self, placement: int) -> None:
        """Give a placement up, perhaps: its tokens so far stay, as if its worker had died."""
        if self._dice.random() < 0.5:
            await turns(self._dice.choice([20, 100, 300]))
            self._num_lost = placement
            await self._client.cancel(self._decode.record, self._name, placement)

    async def _follow(self, events: list[pb.FeedEvent]) -> None:
        """Read what comes of a placement until it is lost, or nothing more is wanted."""
        num_read = 0

        def has_news() -> bool:
            return len(events) > num_read or is_lost() or not self._open

        def is_lost() -> bool:
            return self._num_lost == self._placement

        while self._open and not is_lost():
            await until(has_news, f"more of {self._name}", 30)
            for event in events[num_read:]:
                num_read += 1
                if event.HasField("failed"):
                    assert event.failed.code in RETRYABLE, event.failed
                    assert event.failed.is_retryable
                    return
                self._take(event)

    def _take(self, event: pb.FeedEvent) -> None:
        if event.HasField("tokens") and not event.tokens.is_early:
            self._take_tokens(event.tokens)
        elif event.HasField("finished"):
            told = self.choices[event.finished.choice]
            assert not told.is_open or told.shown == told.expected
            told.is_open = False

    def _take_tokens(self, tokens: pb.Tokens) -> None:
        of_prompt = list(map(logprobs_of, tokens.prompt_logprobs))
        assert of_prompt == (list(map(likelihood, self._prompt[1:])) if self._lacks_prompt else [])
        self._lacks_prompt = False
        told = self.choices[tokens.choice]
        if told.is_open:
            assert tokens.index == len(told.shown)
            told.shown += tokens.ids
            assert told.shown == told.expected[: len(told.shown)]
            logprobs = list(map(logprobs_of, tokens.logprobs))
            assert logprobs == (list(map(likelihood, tokens.ids)) if self._asks else [])

    async def _lose_interest(self) -> None:
        """Have enough of some choices, or of all, sooner or later."""
        while self._dice.random() < 0.5:
            await turns(self._dice.choice([1, 20, 200]))
            if self._dice.random() < 0.3:
                for told in self.choices.values():
                    told.is_open = False
                await self._client.cancel(self._decode.record, self._name, self._placement)
            elif self._open:
                choice = self._dice.choice(sorted(self._open))
                self.choices[choice].is_open = False
                await self._client.cancel(self._decode.record, self._name, self._placement, choice)


async def stall(decode: Node[DecodeWorker], dice: random.Random, is_over: asyncio.Event) -> None:
    """Let copies stop and go."""
    gate = puller(decode).gate
    while not is_over.is_set():
        await turns(dice.randrange(50))
        gate.clear()
        await turns(dice.randrange(50))
        gate.set()
        await asyncio.sleep(0.001)


async def kill(fabric: Fabric, dice: random.Random, is_over: asyncio.Event) -> None:
    """Kill a prefill worker again and again; its successor has its name."""
    while not is_over.is_set():
        prefill = await fabric.prefill("prefill-1", num_blocks=20)
        await asyncio.sleep(dice.random() / 10)
        await prefill.kill()


@pytest.mark.parametrize("seed", range(3))
async def test_chaos(fabric: Fabric, seed: int) -> None:
    dice = random.Random(seed)
    decode = await fabric.decode(num_blocks=16, lease_s=0.3, max_sequences=6, token_budget=16)
    await fabric.know(decode, await fabric.prefill("prefill-0", num_blocks=20))
    client = await fabric.client(decode.record)
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as trouble:
        trouble.create_task(stall(decode, dice, is_over))
        trouble.create_task(kill(fabric, dice, is_over))
        async with asyncio.TaskGroup() as requests:
            for number in range(NUM_REQUESTS):
                requests.create_task(Request(client, decode, str(number), dice).live())
                await turns(dice.randrange(30))
        is_over.set()
    await until(lambda: not len(decode.worker._ledger), "nobody is left")
    await fabric.until_idle()
    assert not decode.worker._receiver._running
    assert not decode.edge.load.num_violations
