"""The gRPC service that every worker offers to the gateways, shared by both roles."""

from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from common.messages.ids import ChoiceIndex, Epoch, GatewayId, PlacementNumber, RequestId
from common.runtime.feeds import FeedHub
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import WorkerServicer


class Desk(Protocol):
    """What a worker does for gateways beside feeding them."""

    def cancel(self, request: RequestId, placement: PlacementNumber) -> None:
        """End a placement and older ones."""

    def cancel_choice(self, request: RequestId, placement: PlacementNumber, choice: ChoiceIndex) -> None:
        """End one choice of that very placement; the others go on."""

    def supply_prompt(self, request: RequestId, placement: PlacementNumber, ids: bytes) -> bool:
        """Take the ids of a long prompt; False if the placement is not here."""


class GatewayServicer(WorkerServicer):
    """Serves feeds, cancels and long prompts."""

    def __init__(self, epoch: Epoch, feeds: FeedHub, desk: Desk) -> None:
        self._epoch = epoch
        self._feeds = feeds
        self._desk = desk

    async def Feed(  # noqa: N802 - named by the service
        self, request: pb.FeedRequest, context: "grpc.aio.ServicerContext[pb.FeedRequest, pb.FeedFrame]"
    ) -> AsyncIterator[pb.FeedFrame]:
        """Stream the events of one gateway; refuse a gateway that wants another incarnation."""
        if request.epoch != self._epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker has another epoch")
        async for frame in self._feeds.serve(GatewayId(request.gateway)):
            yield frame

    async def Cancel(  # noqa: N802 - named by the service
        self, request: pb.CancelRequest, context: "grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]"
    ) -> pb.CancelReply:
        """End a placement, or one of its choices."""
        key = RequestId(request.request), PlacementNumber(request.placement)
        if request.HasField("choice"):
            self._desk.cancel_choice(*key, ChoiceIndex(request.choice))
        else:
            self._desk.cancel(*key)
        return pb.CancelReply()

    async def Prompt(  # noqa: N802 - named by the service
        self, request: pb.PromptRequest, context: "grpc.aio.ServicerContext[pb.PromptRequest, pb.PromptReply]"
    ) -> pb.PromptReply:
        """Take a long prompt."""
        is_known = self._desk.supply_prompt(RequestId(request.request), PlacementNumber(request.placement), request.ids)
        return pb.PromptReply(is_known=is_known)
