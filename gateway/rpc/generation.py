"""`tandem.v1.Generation`, the service of generation requests, as this gateway serves it."""

from collections.abc import Awaitable, Callable
from contextlib import closing

import grpc

from common.errors import InvalidRequest
from common.messages.ids import RequestId, TenantId
from common.messages.registry import ModelCard
from gateway.delivery import deliver
from gateway.outbox import CAPACITY_BYTES, Outbox
from gateway.request_ids import request_of
from gateway.rpc.authenticating import caller
from gateway.rpc.calls import current
from gateway.rpc.events import MessageSink, started
from gateway.rpc.message_carrier import MessageCarrier
from gateway.rpc.requests import valid_request
from gateway.service import Service
from gateway.serving import Serving, Visit, serve
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationServicer

STATUS_MARGIN_S = 0.02
"""So much before its client's deadline a request ends, for its status to arrive: at the deadline itself the client's
gRPC ends the call, and ours would be told of nothing but a client that left."""


class Generation(GenerationServicer):
    """Behind `Root`. `cancel` ends a tenant's request wherever it is, and returns whether it was under way."""

    def __init__(self, service: Service, cancel: Callable[[RequestId, TenantId], Awaitable[bool]]) -> None:
        self._service = service
        self._cancel = cancel

    async def Generate(  # type: ignore[override]  # noqa: N802 - a coroutine that writes: see `calls`
        self,
        request: pb.GenerateRequest,
        context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]",
    ) -> None:
        """Answer one prompt with some choices."""
        call, settings = current.get(), self._service.settings
        visit = Visit(
            request=call.request,
            caller=caller.get(),
            span=call.span,
            arrived_s=call.arrived_s,
            limit_s=_limit_s(context.time_remaining(), settings.deadline_s),
            num_bytes=request.ByteSize(),
            on_quota=call.note_quota,
        )

        async def write(served: Serving) -> None:
            outbox: Outbox[pb.GenerateResponse] = Outbox(settings.ping_interval_s, CAPACITY_BYTES, weigh=_size)
            shows_text = request.wants_text or not request.wants_token_ids
            with closing(MessageCarrier(context, settings.write_timeout_s)) as carrier:
                await carrier.carry((started(call.request, served),))
                answer = served.answer(MessageSink(served, outbox, shows_text=shows_text))
                await deliver(carrier, outbox, answer, settings.max_silence_s)
            served.note_end(answer, call.request)

        await serve(self._service, visit, valid_request(request), write)

    async def ListModels(  # noqa: N802 - named by the service
        self,
        request: pb.ListModelsRequest,
        context: "grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsReply]",
    ) -> pb.ListModelsReply:
        """List what the registry knows now and the caller may use."""
        cards, asker = await self._service.models.cards(), caller.get()
        return pb.ListModelsReply(models=[_model(card) for card in cards if asker.may_see(card.model)])

    async def Cancel(  # noqa: N802 - named by the service
        self, request: pb.CancelRequest, context: "grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]"
    ) -> pb.CancelReply:
        """End a request of the caller's; one of somebody else is not known."""
        named = request_of(request.id)
        if named is None:
            raise InvalidRequest("`id` must be the id of a response.", param="id")
        return pb.CancelReply(is_known=await self._cancel(named, caller.get().tenant))


def _size(message: pb.GenerateResponse) -> int:
    return message.ByteSize()


def _model(card: ModelCard) -> pb.Model:
    return pb.Model(id=card.model, created=card.created, max_context=card.max_context, vocab_size=card.vocab_size)


def _limit_s(remaining_s: float | None, default_s: float | None) -> float | None:
    """Return the shorter of the client's deadline and the server's own, None without both."""
    if remaining_s is None:
        return default_s
    own_s = remaining_s - STATUS_MARGIN_S
    return own_s if default_s is None else min(own_s, default_s)
