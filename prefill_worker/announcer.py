"""Tells decode workers about finished pages and the first token, one task per binding, in order.

The first token goes to the gateway first (the early copy), then to the decode worker, which repeats it as its author.
Where the client wants logprobs of its prompt there is no early copy: they stand before the first token, and the decode
worker alone sends them.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from common.errors import PeerError
from common.messages.chain import chain_of
from common.messages.ids import Epoch
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.rpc.logprobs import logprobs_message
from common.runtime.feeds import FeedHub
from common.telemetry.logs import request_id
from prefill_worker.core import SpanReady
from prefill_worker.holdings import Holding, Holdings, key_for
from prefill_worker.witness import Witness
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import DecodeStub

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import DecodeAsyncStub

logger = logging.getLogger(__name__)

RPC_TIMEOUT_S = 2.0


class Announcer:
    """Follows every binding from its first page to its commit."""

    def __init__(
        self,
        epoch: Epoch,
        channels: Channels,
        feeds: FeedHub,
        holdings: Holdings,
        witness: Witness,
        block_size: int,
    ) -> None:
        self._epoch = epoch
        self._channels = channels
        self._feeds = feeds
        self._holdings = holdings
        self._witness = witness
        self._block_size = block_size

    def follow(self, holding: Holding) -> None:
        """Start to announce what `holding.spans` will bring."""
        holding.follower = asyncio.create_task(self._follow(holding), name=f"announce-{holding.key}")

    def deliver(self, span: SpanReady) -> None:
        """Pass on what the engine finished; a binding that is over is ignored."""
        holding = self._holdings.get(key_for(span.key))
        if holding is not None:
            holding.is_computed = _is_last(span)
            holding.spans.put_nowait(span)

    async def hand_back(self) -> None:
        """Tell the authors of what is left to do without us: we leave in order, so nobody should count us as dead."""
        await asyncio.gather(*(self._hand_back(holding) for holding in self._holdings.all()))

    async def _hand_back(self, holding: Holding) -> None:
        try:
            await self._commit(self._stub(holding), holding, pb.CommitRequest(failure="the prefill worker is leaving"))
        except PeerError as error:
            logger.info("binding not handed back: %s", error, extra={"request_id": holding.task.request})

    async def _follow(self, holding: Holding) -> None:
        request_id.set(holding.task.request)
        stub = self._stub(holding)
        is_committed = False
        try:
            while not is_committed:
                span = await holding.spans.get()
                if await self._tell(stub, holding, span) != pb.VERDICT_GO:
                    return
                is_committed = _is_last(span)
        except PeerError as error:
            logger.warning("lost while announcing: %s", error)
        except Exception:  # root of a task
            logger.exception("announcing failed")
        finally:
            if not is_committed:  # its author would wait for the rest as long as we let it renew the lease
                self._holdings.end(holding.key)

    async def _tell(self, stub: "DecodeAsyncStub", holding: Holding, span: SpanReady) -> "pb.Verdict.ValueType":
        if span.failure is not None:
            self._witness.failed(holding, span.failure)
            await self._commit(stub, holding, pb.CommitRequest(failure=span.failure))
            return pb.VERDICT_CANCELLED  # nothing is left to hold
        traceparent = ""
        if span.token is not None:
            if holding.task.sampling.num_prompt_logprobs is None:
                self._send_early_copy(holding, span.token, span)
            traceparent = self._witness.prefilled(holding, span)
        verdict = pb.VERDICT_GO
        pages = [
            pb.PageRef(block_index=page.block_index, page=page.page, generation=page.generation, checksum=page.checksum)
            for page in span.pages
            if page.block_index in holding.wanted
        ]
        if pages:
            request = pb.AnnounceRequest(binding=holding.binding, epoch=self._epoch, pages=pages)
            call = stub.Announce(request, timeout=RPC_TIMEOUT_S)
            verdict = (await reply_from(holding.author.worker, call)).verdict
        if verdict == pb.VERDICT_GO and span.token is not None:
            commit = await _commit_message(span, span.token, traceparent)
            verdict = await self._commit(stub, holding, commit)
        return verdict

    async def _commit(
        self, stub: "DecodeAsyncStub", holding: Holding, commit: pb.CommitRequest
    ) -> "pb.Verdict.ValueType":
        commit.binding.CopyFrom(holding.binding)
        commit.epoch = self._epoch
        call = stub.Commit(commit, timeout=RPC_TIMEOUT_S)
        return (await reply_from(holding.author.worker, call)).verdict

    def _stub(self, holding: Holding) -> "DecodeAsyncStub":
        return DecodeStub(self._channels.channel(holding.author.address, holding.author.epoch))

    def _send_early_copy(self, holding: Holding, token: int, span: SpanReady) -> None:
        """Send the token ahead; like its author, count what either side had cached."""
        task = holding.task
        num_cached = min(max(span.num_cached, holding.wanted.start * self._block_size), task.num_prompt_tokens)
        tokens = pb.Tokens(
            index=task.num_tokens - task.num_prompt_tokens,
            ids=[token],
            chain=chain_of(holding.shown),
            is_early=True,
            num_cached_tokens=num_cached,
            choice=task.choice,
            logprobs=[] if span.logprobs is None else [logprobs_message(span.logprobs)],
        )
        event = pb.FeedEvent(request=task.request, placement=task.placement, tokens=tokens)
        self._feeds.push(task.gateway, event)


async def _commit_message(span: SpanReady, token: int, traceparent: str) -> pb.CommitRequest:
    logprobs = None if span.logprobs is None else logprobs_message(span.logprobs)
    commit = pb.CommitRequest(
        token=token, num_cached_tokens=span.num_cached, traceparent=traceparent, logprobs=logprobs
    )
    if span.prompt_logprobs:  # of a long prompt they take a while: others go on meanwhile
        messages = await asyncio.to_thread(lambda: [logprobs_message(each) for each in span.prompt_logprobs])
        commit.prompt_logprobs.extend(messages)
    return commit


def _is_last(span: SpanReady) -> bool:
    return span.token is not None or span.failure is not None
