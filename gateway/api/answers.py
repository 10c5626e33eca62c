"""The answer to a generation request over HTTP, up to its last byte, streamed or whole."""

from collections.abc import Mapping
from contextlib import closing
from functools import partial

from aiohttp import web
from msgspec import UNSET, structs

from gateway.accepting import Accepted
from gateway.api.errors import encoded_response
from gateway.api.heading import heading_of
from gateway.api.keys import ARRIVED_S, CALLER, EVENT_STREAM, QUOTA, REQUEST_ID, SERVICE, SPAN
from gateway.api.shape import AnswerShape, Endpoint
from gateway.api.streaming import EventCarrier, StreamSink
from gateway.collection import Collection
from gateway.deadline import HEADER, limit_of
from gateway.delivery import deliver
from gateway.outbox import CAPACITY_BYTES, Outbox
from gateway.schemas.usage import Timing
from gateway.serving import Serving, Visit, serve
from gateway.sse import EventStream
from gateway.validation import ValidRequest

TIMING_HEADER = "x-tandem-timing"

MANY_TOKENS = 1000
"""Writing the logprobs of this many tokens takes about 5 ms; more are written in a thread."""


async def answer(http: web.Request, request: ValidRequest, endpoint: Endpoint) -> web.StreamResponse:
    """Serve `request`; errors are raised, also in the middle of a stream (`answer_errors` answers them)."""
    service, visit = http.app[SERVICE], await visit_of(http)
    return await serve(service, visit, request, partial(_stream if request.form.streams else _whole, http, endpoint))


async def visit_of(http: web.Request) -> Visit:
    """Return who asks, since when, and for how long; the body has been read already."""
    return Visit(
        request=http[REQUEST_ID],
        caller=http[CALLER],
        span=http[SPAN],
        arrived_s=http[ARRIVED_S],
        limit_s=limit_of(http.headers.getall(HEADER, ()), http.app[SERVICE].settings.deadline_s),
        num_bytes=len(await http.read()),
        on_quota=partial(http.__setitem__, QUOTA),
    )


async def _whole(http: web.Request, endpoint: Endpoint, served: Serving) -> web.StreamResponse:
    accepted, service, collection = served.accepted, served.service, Collection()
    form, shape = accepted.request.form, _shape(http, accepted, endpoint)
    made = served.answer(collection)
    await made.read(service.settings.max_silence_s)
    served.note_end(made, _response_id(http, endpoint))
    choices = collection.best(form.num_choices, form.num_generated)
    timing = served.record.timing(made.times) if _wants_timing(http, accepted) else UNSET

    def write() -> bytes:
        return shape.whole(choices, made.usage, timing)

    is_long = sum(len(choice.tokens) for choice in choices) > MANY_TOKENS
    body = await service.models.run(write) if is_long else write()
    headers = None if timing is UNSET else server_timing(timing)
    return encoded_response(body, headers=headers)


async def _stream(http: web.Request, endpoint: Endpoint, served: Serving) -> web.StreamResponse:
    accepted, settings = served.accepted, served.service.settings
    stream = http[EVENT_STREAM] = EventStream(http, settings.write_timeout_s)
    carrier = EventCarrier(stream)
    outbox: Outbox[bytes] = Outbox(settings.ping_interval_s, CAPACITY_BYTES, stream.offer, len)
    timing = served.record.timing if _wants_timing(http, accepted) else None
    made = served.answer(StreamSink(_shape(http, accepted, endpoint), outbox, accepted.request.form, timing))
    with closing(stream):
        await deliver(carrier, outbox, made, settings.max_silence_s)
    served.note_end(made, _response_id(http, endpoint))
    assert stream.response is not None  # the end has been sent
    return stream.response


def _shape(http: web.Request, accepted: Accepted, endpoint: Endpoint) -> AnswerShape:
    heading = heading_of(http, endpoint.id_prefix, accepted.model, includes_usage=accepted.request.form.includes_usage)
    return endpoint.shape(heading, accepted)


def _response_id(http: web.Request, endpoint: Endpoint) -> str:
    return f"{endpoint.id_prefix}-{http[REQUEST_ID]}"


def _wants_timing(http: web.Request, accepted: Accepted) -> bool:
    return accepted.request.form.includes_timing or asks_for_timing(http)


def asks_for_timing(http: web.Request) -> bool:
    """Return whether a header asks where the time goes."""
    return http.headers.get(TIMING_HEADER, "").lower() == "true"


def server_timing(timing: Timing) -> Mapping[str, str]:
    """Return the header that browsers and proxies read, in milliseconds."""
    stages = {name.removesuffix("_s"): seconds for name, seconds in structs.asdict(timing).items()}
    parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in stages.items() if seconds is not None]
    return {"Server-Timing": ", ".join(parts)}
