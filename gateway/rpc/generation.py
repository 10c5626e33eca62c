"""`tandem.v1.Generation`, the service of generation requests, as this gateway serves it."""

from collections.abc import Awaitable, Callable

import grpc

from common.errors import BrokerUnavailable
from common.messages.ids import RequestId, TenantId
from gateway.request_ids import request_of
from gateway.rpc.authenticating import caller
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationServicer


class Generation(GenerationServicer):
    """Serves cancels. `cancel` ends a tenant's request wherever it is, and returns whether it was under way."""

    def __init__(self, cancel: Callable[[RequestId, TenantId], Awaitable[bool]]) -> None:
        self._cancel = cancel

    async def Cancel(  # noqa: N802 - named by the service
        self, request: pb.CancelRequest, context: "grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]"
    ) -> pb.CancelReply:
        """End a request of the caller's; one of somebody else is not known."""
        named = request_of(request.id)
        if named is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "`id` must be the id of a response")
        try:
            return pb.CancelReply(is_known=await self._cancel(named, caller.get().tenant))
        except BrokerUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
