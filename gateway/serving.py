"""What stands around every generation request, whatever brought it here: permission, deadline, record, admission,
acceptance, and the one note of its end.

A transport makes a `Visit` and a `ValidRequest` of what it got, and writes what a `Serving` gives it.
"""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from common.broker.limits import Quota
from common.errors import Overloaded
from common.messages.ids import RequestId
from common.telemetry.traces import Stage
from gateway.accepting import Accepted, accept
from gateway.answer import Answer, AnswerSink
from gateway.brake import Flow
from gateway.callers import Caller
from gateway.claims import Claim, estimated_tokens, ignore_quota
from gateway.deadline import Deadline
from gateway.engine import FinishReason
from gateway.request_record import RequestRecord
from gateway.service import Service
from gateway.spans import RequestSpan
from gateway.validation import ValidRequest

WrittenT = TypeVar("WrittenT")


@dataclass(frozen=True, slots=True)
class Visit:
    """A request on its way in. `arrived_s` is on the monotonic clock; `limit_s` is its time from then on, None: without
    end; `num_bytes` is how long it was as it came. `on_quota` hears what its tenant has left.
    """

    request: RequestId
    caller: Caller
    span: RequestSpan
    arrived_s: float
    limit_s: float | None
    num_bytes: int
    on_quota: Callable[[Quota], None] = ignore_quota

    def claim(self, request: ValidRequest, record: RequestRecord) -> Claim:
        """Return what the request wants to be admitted for."""
        return Claim(
            caller=self.caller,
            request=self.request,
            num_choices=len(request.prompts) * request.form.num_generated,
            num_prompt_tokens=estimated_tokens(self.num_bytes),
            max_tokens=request.max_tokens,
            meter=record,
            on_quota=self.on_quota,
        )


@dataclass(frozen=True, slots=True)
class Serving:
    """A request that is being served: it holds its permit, and its time runs."""

    service: Service
    accepted: Accepted
    record: RequestRecord
    span: RequestSpan

    def answer(self, sink: AnswerSink) -> Answer:
        """Return the answer, which fills `sink` once it is read."""
        return Answer(self.accepted, self.service.engine, sink, self.record)

    def note_end(self, answer: Answer, response_id: str) -> None:
        """Note that the client has got the whole answer, under that id."""
        reasons = [choice.reason for choice in answer.choices]
        self.record.ended(FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP)
        self.span.answered(response_id, self.accepted.model.card.model, reasons, answer.usage)


async def serve(
    service: Service, visit: Visit, request: ValidRequest, write: Callable[[Serving], Awaitable[WrittenT]]
) -> WrittenT:
    """Let the request in and return what `write` makes of it; then all that it holds has been released.

    Raises what is wrong with it or refuses it, and `DeadlineExceeded`, `RequestCancelled` or `Draining` also in the
    middle of `write`.
    """
    visit.caller.require(request.model, request.sampling.priority)
    deadline = Deadline(visit.limit_s, visit.arrived_s)
    flow = Flow(request.model, visit.caller.tenant, visit.caller.priority(request.sampling.priority))
    with RequestRecord(service.metrics, visit.arrived_s) as record:
        service.brake.check(flow, visit.limit_s)
        try:
            async with deadline.enforced(), AsyncExitStack() as held:
                with service.under_way.stay(visit.request, visit.caller.tenant):
                    with visit.span.stage(Stage.ADMIT), record.timed(Stage.ADMIT):
                        claim = visit.claim(request, record)
                        metering = await held.enter_async_context(service.admission.reserve(claim))
                    accepted = await accept(service, request, visit.request, visit.span, deadline, record, metering)
                    return await write(Serving(service, accepted, record, visit.span))
        except Overloaded as error:
            service.brake.note(flow, visit.limit_s, error)
            raise
