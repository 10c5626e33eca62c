"""Behind the end of its placement a stream shows nothing more."""

from common.messages.chain import chain_of
from common.messages.ids import Epoch, ModelName, RequestId, WorkerId
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, TokenDelta
from gateway.streams import Source, Stream
from proto import worker_pb2 as pb

DECODE, PREFILL = Source(WorkerId("decode-0"), Epoch(1)), Source(WorkerId("prefill-0"), Epoch(2))


async def test_an_early_copy_behind_the_end_changes_nothing() -> None:
    sampling = SamplingParams(seed=1, max_tokens=8)
    stream = Stream(GenerateRequest(RequestId("r"), ModelName("m"), [5, 6], sampling), max_failures=3)
    stream.begin_placement()
    for event in (
        pb.FeedEvent(accepted=pb.Accepted()),
        pb.FeedEvent(tokens=pb.Tokens(index=0, ids=[7], chain=chain_of([]))),
        pb.FeedEvent(finished=pb.Finished(reason="stop", num_generated=1)),
        pb.FeedEvent(tokens=pb.Tokens(index=1, ids=[8], chain=chain_of([7]), is_early=True)),
    ):
        event.request, event.placement = "r", 1
        stream.take(PREFILL if event.tokens.is_early else DECODE, event)
    assert await stream.next() == TokenDelta(0, (7,))
    assert await stream.next() == EndOfChoice(FinishReason.STOP, 1)
