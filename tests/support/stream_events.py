"""Events as workers send them about one request "r", a stream that hears them, and its reader."""

import asyncio
from collections.abc import Sequence

from common.messages.chain import chain_of
from common.messages.ids import Epoch, ModelName, RequestId, WorkerId
from common.messages.sampling import SamplingParams
from gateway.engine import GenerateRequest
from gateway.losses import LossReason, PlacementLost
from gateway.streams import Source, Stream, StreamItem
from proto import worker_pb2 as pb

DECODE = Source(WorkerId("decode-0"), Epoch(1))
OTHER = Source(WorkerId("decode-1"), Epoch(2))
PREFILL = Source(WorkerId("prefill-0"), Epoch(3))
MAX_FAILURES = 3
GONE = PlacementLost(LossReason.LOST, "gone")
READ_S = 5.0


def make_stream(
    max_tokens: int = 8,
    stop_ids: tuple[int, ...] = (2,),
    *,
    prompt: Sequence[int] = (5, 6),
    num_choices: int = 1,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    vocab_size: int | None = None,
) -> Stream:
    """Return a stream whose first placement has begun."""
    sampling = SamplingParams(
        seed=1,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    request = GenerateRequest(
        RequestId("r"), ModelName("m"), prompt, sampling, num_choices=num_choices, vocab_size=vocab_size
    )
    stream = Stream(request, MAX_FAILURES)
    stream.begin_placement()
    return stream


def accepted(placement: int = 1) -> pb.FeedEvent:
    return pb.FeedEvent(request="r", placement=placement, accepted=pb.Accepted())


def tokens(
    index: int,
    ids: Sequence[int],
    before: Sequence[int],
    *,
    early: bool = False,
    placement: int = 1,
    choice: int = 0,
    logprobs: Sequence[pb.TokenLogprobs] = (),
    prompt_logprobs: Sequence[pb.TokenLogprobs] = (),
) -> pb.FeedEvent:
    """Return tokens that were computed behind those `before`."""
    frame = pb.Tokens(
        index=index,
        ids=ids,
        chain=chain_of(before),
        is_early=early,
        choice=choice,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return pb.FeedEvent(request="r", placement=placement, tokens=frame)


def finished(
    num_generated: int,
    reason: str = "length",
    *,
    placement: int = 1,
    choice: int = 0,
    times: pb.StageTimes | None = None,
) -> pb.FeedEvent:
    end = pb.Finished(reason=reason, num_generated=num_generated, choice=choice, times=times)
    return pb.FeedEvent(request="r", placement=placement, finished=end)


async def drain(stream: Stream, count: int) -> list[StreamItem | None]:
    """Return what the reader gets next."""
    async with asyncio.timeout(READ_S):
        return [await stream.next() for _ in range(count)]
