"""A generation request, from its validated form to the last byte of its answer, streamed or whole."""

from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from functools import partial

from aiohttp import web
from msgspec import UNSET, structs

from common.telemetry.traces import Stage
from gateway.accepting import Accepted, accept
from gateway.answer import Answer
from gateway.api.heading import heading_of
from gateway.api.keys import ARRIVED_S, CALLER, EVENT_STREAM, QUOTA, REQUEST_ID, SERVICE, SPAN
from gateway.api.shape import AnswerShape, Endpoint
from gateway.api.streaming import StreamSink, send_answer
from gateway.claims import Claim, estimated_tokens
from gateway.collection import Collection
from gateway.deadline import HEADER, Deadline, limit_of
from gateway.engine import FinishReason
from gateway.outbox import Outbox
from gateway.request_record import RequestRecord
from gateway.schemas.usage import Timing
from gateway.service import Service
from gateway.sse import EventStream
from gateway.validation import ValidRequest

TIMING_HEADER = "x-tandem-timing"

MANY_TOKENS = 1000
"""Writing the logprobs of this many tokens takes about 5 ms; more are written in a thread."""


async def answer(http: web.Request, request: ValidRequest, endpoint: Endpoint) -> web.StreamResponse:
    """Serve `request`; errors are raised, also in the middle of a stream (`answer_errors` answers them)."""
    service = http.app[SERVICE]
    http[CALLER].require(request.model, request.sampling.priority or 0)
    limit_s = limit_of(http.headers.getall(HEADER, ()), service.settings.deadline_s)
    deadline = Deadline(limit_s, http[ARRIVED_S])
    with RequestRecord(service.metrics, http[ARRIVED_S]) as record:
        async with deadline.enforced(), AsyncExitStack() as held:
            with http[SPAN].stage(Stage.ADMIT), record.timed(Stage.ADMIT):
                claim = await _claim(http, request, record)
                metering = await held.enter_async_context(service.admission.reserve(claim))
            accepted = await accept(service, request, http[REQUEST_ID], http[SPAN], deadline, record, metering)
            serve = _stream if request.form.streams else _whole
            return await serve(http, service, accepted, endpoint, record)


async def _claim(http: web.Request, request: ValidRequest, record: RequestRecord) -> Claim:
    return Claim(
        caller=http[CALLER],
        request=http[REQUEST_ID],
        num_choices=len(request.prompts) * request.form.num_generated,
        num_prompt_tokens=estimated_tokens(len(await http.read())),  # has been read already
        max_tokens=request.max_tokens,
        meter=record,
        on_quota=partial(http.__setitem__, QUOTA),
    )


async def _whole(
    http: web.Request, service: Service, accepted: Accepted, endpoint: Endpoint, record: RequestRecord
) -> web.StreamResponse:
    form, collection = accepted.request.form, Collection()
    shape = _shape(http, accepted, endpoint)
    made = Answer(accepted, service.engine, collection, record)
    await made.read(service.settings.max_silence_s)
    _note_end(http, accepted, endpoint, record, made)
    choices = collection.best(form.num_choices, form.num_generated)
    timing = record.timing(made.times) if _wants_timing(http, accepted) else UNSET

    def write() -> bytes:
        return shape.whole(choices, made.usage, timing)

    is_long = sum(len(choice.tokens) for choice in choices) > MANY_TOKENS
    body = await service.models.run(write) if is_long else write()
    headers = {} if timing is UNSET else _server_timing(timing)
    return web.Response(body=body, headers=headers, content_type="application/json", charset="utf-8")


async def _stream(
    http: web.Request, service: Service, accepted: Accepted, endpoint: Endpoint, record: RequestRecord
) -> web.StreamResponse:
    stream = http[EVENT_STREAM] = EventStream(http, service.settings.write_timeout_s)
    outbox: Outbox[bytes] = Outbox(service.settings.ping_interval_s)
    timing = record.timing if _wants_timing(http, accepted) else None
    sink = StreamSink(_shape(http, accepted, endpoint), outbox, accepted.request.form, timing)
    made = Answer(accepted, service.engine, sink, record)
    with closing(stream):
        await send_answer(stream, outbox, made, service.settings.max_silence_s)
    _note_end(http, accepted, endpoint, record, made)
    assert stream.response is not None  # the end has been sent
    return stream.response


def _shape(http: web.Request, accepted: Accepted, endpoint: Endpoint) -> AnswerShape:
    heading = heading_of(http, endpoint.id_prefix, accepted.model, includes_usage=accepted.request.form.includes_usage)
    return endpoint.shape(heading, accepted)


def _wants_timing(http: web.Request, accepted: Accepted) -> bool:
    return accepted.request.form.includes_timing or http.headers.get(TIMING_HEADER, "").lower() == "true"


def _server_timing(timing: Timing) -> Mapping[str, str]:
    """Return the header that browsers and proxies read, in milliseconds."""
    stages = {name.removesuffix("_s"): seconds for name, seconds in structs.asdict(timing).items()}
    parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in stages.items() if seconds is not None]
    return {"Server-Timing": ", ".join(parts)}


def _note_end(http: web.Request, accepted: Accepted, endpoint: Endpoint, record: RequestRecord, answer: Answer) -> None:
    reasons = [choice.reason for choice in answer.choices]
    record.ended(FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP)
    http[SPAN].answered(f"{endpoint.id_prefix}-{http[REQUEST_ID]}", accepted.model.card.model, reasons, answer.usage)
