"""`POST /v1/responses`: created, streamed or whole, and forgotten."""

from contextlib import closing

import msgspec
from aiohttp import web
from msgspec import UNSET

from common.errors import InvalidRequest
from gateway.api.answers import MANY_TOKENS, asks_for_timing, server_timing, visit_of
from gateway.api.bodies import parse_body
from gateway.api.errors import encoded_response
from gateway.api.keys import EVENT_STREAM, REQUEST_ID, SERVICE
from gateway.api.streaming import EventCarrier
from gateway.delivery import deliver
from gateway.outbox import CAPACITY_BYTES, Outbox
from gateway.responses.request import in_own_words, parse_response
from gateway.responses.sinks import StreamedResponse, WholeResponse, event_bytes
from gateway.responses.writer import ResponseWriter
from gateway.serving import Serving, serve
from gateway.sse import EventStream


async def create_response(http: web.Request) -> web.StreamResponse:
    """Answer a conversation of items."""
    asked = await parse_body(http, parse_response)

    async def write(served: Serving) -> web.StreamResponse:
        writer = ResponseWriter(_response_id(http), asked.fields, served.accepted)
        return await (_stream if asked.chat.form.streams else _whole)(http, served, writer)

    try:
        return await serve(http.app[SERVICE], await visit_of(http), asked.chat, write)
    except InvalidRequest as error:
        raise in_own_words(error) from error


async def _whole(http: web.Request, served: Serving, writer: ResponseWriter) -> web.StreamResponse:
    timing = served.record.timing if asks_for_timing(http) else None
    made = served.answer(WholeResponse(writer, timing))
    await made.read(served.service.settings.max_silence_s)
    served.note_end(made, _response_id(http))
    response = writer.response
    is_long = made.usage.completion_tokens > MANY_TOKENS
    body = (
        await served.service.models.run(lambda: msgspec.json.encode(response))
        if is_long
        else msgspec.json.encode(response)
    )
    headers = None if response.timing is UNSET else server_timing(response.timing)
    return encoded_response(body, headers=headers)


async def _stream(http: web.Request, served: Serving, writer: ResponseWriter) -> web.StreamResponse:
    settings = served.service.settings
    stream = http[EVENT_STREAM] = EventStream(
        http, settings.write_timeout_s, lambda error: event_bytes(writer.failure(error.error))
    )
    outbox: Outbox[bytes] = Outbox(settings.ping_interval_s, CAPACITY_BYTES, stream.offer, len)
    timing = served.record.timing if asks_for_timing(http) else None
    made = served.answer(StreamedResponse(writer, timing, outbox))
    with closing(stream):
        await deliver(EventCarrier(stream), outbox, made, settings.max_silence_s)
    served.note_end(made, _response_id(http))
    assert stream.response is not None  # the end has been sent
    return stream.response


def _response_id(http: web.Request) -> str:
    return f"resp_{http[REQUEST_ID]}"
