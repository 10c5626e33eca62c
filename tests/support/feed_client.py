"""A gateway's end of the internal calls: places jobs, listens, cancels and sends prompts as told."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import msgspec

from common.broker.memory_broker import MemoryBroker
from common.broker.protocols import Candidate
from common.messages.chain import chain_of
from common.messages.codec import pack_ids
from common.messages.ids import FIRST_CHOICE, ChoiceIndex, GatewayId, PlacementNumber, RequestId
from common.messages.job import Job, OpenChoice
from common.messages.registry import WorkerRecord
from common.messages.sampling import SamplingParams
from common.rpc.channels import Channels
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import WorkerStub
from tests.support.broker_records import MODEL
from tests.support.polling import until

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import WorkerAsyncStub


@dataclass(frozen=True)
class Answer:
    """What a placement came to. `reason` is of its one terminal event: "stop", "length" or the code of a failure."""

    tokens: list[int]
    reason: str
    num_cached: int = 0


def make_job(
    request: str,
    prompt: Sequence[int],
    *,
    placement: int = 1,
    max_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    shown: Sequence[int] = (),
    has_prompt: bool = True,
    gateway: str = "gateway-0",
    num_prompt_logprobs: int | None = None,
) -> Job:
    """Return a job; without its prompt if that travels by `Worker.Prompt`."""
    return Job(
        request=RequestId(request),
        placement=PlacementNumber(placement),
        gateway=GatewayId(gateway),
        model=MODEL,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(
            seed=1,
            max_tokens=max_tokens,
            temperature=0.0,
            stop_ids=stop_ids,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        prompt=pack_ids(prompt) if has_prompt else None,
        choices=(OpenChoice(FIRST_CHOICE, pack_ids(shown)),),
    )


def make_choices(
    request: str,
    prompt: Sequence[int],
    shown: Mapping[int, Sequence[int]],
    *,
    placement: int = 1,
    max_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> Job:
    """Return a job with several choices, each with what its client has of it."""
    job = make_job(request, prompt, placement=placement, max_tokens=max_tokens, stop_ids=stop_ids)
    asking = {"num_logprobs": num_logprobs, "num_prompt_logprobs": num_prompt_logprobs}
    return msgspec.structs.replace(
        job,
        sampling=msgspec.structs.replace(job.sampling, **asking),
        choices=tuple(OpenChoice(ChoiceIndex(choice), pack_ids(ids)) for choice, ids in shown.items()),
    )


class FeedClient:
    """One gateway. Feeds are followed until `hang_up`."""

    def __init__(self, broker: MemoryBroker, secret: str, gateway: str = "gateway-0") -> None:
        self._broker = broker
        self._gateway = gateway
        self._channels = Channels(secret)
        self._tasks: list[asyncio.Task[None]] = []
        self._connected: set[str] = set()
        self.events: dict[tuple[str, int], list[pb.FeedEvent]] = defaultdict(list)
        """What came for (request, placement), early copies included."""
        self.stalled: set[str] = set()
        """Workers whose last frame said that their engine is stalled."""

    async def follow(self, record: WorkerRecord) -> None:
        """Connect the feed of a worker."""
        self._tasks.append(asyncio.create_task(self._read(record)))
        await until(lambda: record.worker in self._connected, f"{record.worker} feeds us")

    async def place(self, job: Job, record: WorkerRecord) -> None:
        """Put a job into the stream of a worker, or let it wait for room there."""
        await self._broker.jobs.place(job, 1, [Candidate(record.worker, record.epoch)])

    async def cancel(self, record: WorkerRecord, request: str, placement: int = 1, choice: int | None = None) -> None:
        """Cancel a placement and older ones, or one choice of that placement."""
        message = pb.CancelRequest(request=request, placement=placement, choice=choice)
        await self._stub(record).Cancel(message, timeout=5)

    async def send_prompt(self, record: WorkerRecord, request: str, prompt: Sequence[int]) -> bool:
        """Bring the prompt of placement 1; return whether the worker knows it."""
        message = pb.PromptRequest(request=request, placement=1, ids=pack_ids(prompt))
        return (await self._stub(record).Prompt(message, timeout=5)).is_known

    async def answer(self, request: str, placement: int = 1, deadline_s: float = 5.0) -> Answer:
        """Wait for the terminal event of a placement; fail unless every token came once, in order, rightly chained."""
        events = self.events[request, placement]
        await until(lambda: any(_is_terminal(event) for event in events), f"{request} is over", deadline_s)
        assert [_is_terminal(event) for event in events].count(True) == 1
        own = [event for event in events if not event.tokens.is_early]
        assert _is_terminal(own[-1]), "something came after the terminal event"
        return _answer(own)

    async def answers(
        self, request: str, count: int, placement: int = 1, deadline_s: float = 20.0
    ) -> dict[int, Answer]:
        """Wait until so many choices have ended, or the placement has failed; return what came of each choice."""
        events = self.events[request, placement]

        def is_over() -> bool:
            kinds = [event.WhichOneof("event") for event in events]
            return "failed" in kinds or kinds.count("finished") == count

        await until(is_over, f"{request} is over", deadline_s)
        own = [event for event in events if not event.tokens.is_early]
        by_choice: dict[int, list[pb.FeedEvent]] = defaultdict(list)
        for event in own:
            if event.WhichOneof("event") in {"tokens", "finished"}:
                by_choice[(event.tokens if event.HasField("tokens") else event.finished).choice].append(event)
        failures = [event for event in own if event.WhichOneof("event") == "failed"]
        return {
            choice: _answer(told if told[-1].HasField("finished") else [*told, *failures])
            for choice, told in by_choice.items()
            if failures or told[-1].HasField("finished")
        }

    def early_tokens(self, request: str, placement: int = 1) -> list[int]:
        """Return the tokens that prefill workers have sent ahead."""
        events = self.events[request, placement]
        return [token for event in events if event.tokens.is_early for token in event.tokens.ids]

    def kinds(self, request: str, placement: int = 1) -> list[str]:
        """Return the kinds of the events that came, early copies left out."""
        events = self.events[request, placement]
        return [str(event.WhichOneof("event")) for event in events if not event.tokens.is_early]

    async def hang_up(self) -> None:
        """Disconnect every feed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Disconnect everything."""
        await self.hang_up()
        await self._channels.close()

    def _stub(self, record: WorkerRecord) -> "WorkerAsyncStub":
        return WorkerStub(self._channels.channel(record.address, record.epoch))

    async def _read(self, record: WorkerRecord) -> None:
        call = self._stub(record).Feed(pb.FeedRequest(gateway=self._gateway, epoch=record.epoch))
        try:
            async for frame in call:
                self._connected.add(record.worker)
                (self.stalled.add if frame.is_stalled else self.stalled.discard)(record.worker)
                for event in frame.events:
                    self.events[event.request, event.placement].append(event)
        except grpc.aio.AioRpcError:
            return  # the worker is gone
        finally:
            call.cancel()


def _is_terminal(event: pb.FeedEvent) -> bool:
    return event.WhichOneof("event") in {"finished", "failed"}


def _answer(events: Sequence[pb.FeedEvent]) -> Answer:
    tokens: list[int] = []
    first = next((event.tokens.index for event in events if event.WhichOneof("event") == "tokens"), 0)
    for event in events:
        if event.WhichOneof("event") == "tokens":
            assert event.tokens.index == first + len(tokens)
            assert first or event.tokens.chain == chain_of(tokens)
            tokens += event.tokens.ids
    last = events[-1]
    if last.WhichOneof("event") == "failed":
        return Answer(tokens, last.failed.code)
    assert last.finished.num_generated == first + len(tokens)
    return Answer(tokens, last.finished.reason, last.finished.num_cached_tokens)
