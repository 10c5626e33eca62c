"""A generation request, from its validated form to the last byte of its answer, streamed or whole."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from common.errors import GenerationFailed
from common.telemetry.traces import Stage
from gateway.api.heading import Heading, heading_of
from gateway.api.keys import ARRIVED_S, EVENT_STREAM, REQUEST_ID, SERVICE, SPAN
from gateway.deadline import HEADER, Deadline, limit_of
from gateway.engine import FinishReason, GenerateRequest
from gateway.event_buffer import EventBuffer
from gateway.prompts import encode_prompt
from gateway.request_record import RequestRecord
from gateway.sampling import random_seed, settle_sampling
from gateway.schemas.usage import PromptTokensDetails, Usage
from gateway.served_models import ServedModel
from gateway.service import Service
from gateway.sse import DONE, EventStream
from gateway.text_stream import AnswerText, TextDelta, TextEnd, TextEvent, stream_text
from gateway.validation import ValidRequest


class AnswerShape(Protocol):
    """How an endpoint writes one answer as JSON."""

    def opening(self) -> list[bytes]:
        """Return what a stream starts with."""

    def delta(self, text: str) -> bytes:
        """Return the chunk of more text."""

    def ending(self, reason: FinishReason) -> bytes:
        """Return the last chunk of the choice."""

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that holds the usage."""

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """Return the answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What sets an endpoint's answers apart: what their ids begin with, and their shape."""

    id_prefix: str
    shape: Callable[[Heading], AnswerShape]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request with everything that its answer needs."""

    request: ValidRequest
    generate: GenerateRequest
    model: ServedModel
    heading: Heading
    shape: AnswerShape

    def usage(self, end: TextEnd) -> Usage:
        """Return the counts of the finished answer."""
        num_prompt = len(self.generate.prompt_ids)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=end.num_tokens,
            total_tokens=num_prompt + end.num_tokens,
            prompt_tokens_details=PromptTokensDetails(end.num_cached_tokens),
        )


async def answer(http: web.Request, request: ValidRequest, endpoint: Endpoint) -> web.StreamResponse:
    """Serve `request`; errors are raised, also in the middle of a stream (`answer_errors` answers them)."""
    service = http.app[SERVICE]
    limit_s = limit_of(http.headers.getall(HEADER, ()), service.settings.deadline_s)
    deadline = Deadline(limit_s, http[ARRIVED_S])
    with RequestRecord(service.metrics, http[ARRIVED_S]) as record:
        async with deadline.enforced():
            with http[SPAN].stage(Stage.ADMIT):
                permit = service.admission.admit()
            with permit:
                accepted = await _accept(http, service, request, endpoint, deadline)
                record.model = accepted.model.card.model
                record.num_prompt_tokens = len(accepted.generate.prompt_ids)
                serve = _stream if request.streams else _whole
                return await serve(http, service, accepted, record)


async def _accept(
    http: web.Request, service: Service, request: ValidRequest, endpoint: Endpoint, deadline: Deadline
) -> Accepted:
    model = await service.models.get(request.model)
    with http[SPAN].stage(Stage.TOKENIZE):
        prompt_ids = await encode_prompt(request.prompt, model, service.models)
    sampling = settle_sampling(request, model.card, len(prompt_ids), random_seed())
    http[SPAN].asked(request.prompt.operation, model.card.model, sampling, len(prompt_ids))
    generate = GenerateRequest(
        request=http[REQUEST_ID],
        model=request.model,
        prompt_ids=prompt_ids,
        sampling=sampling,
        cache_salt=request.cache_salt,
        traceparent=http[SPAN].traceparent,
        tracestate=http[SPAN].tracestate,
        fingerprint=model.card.fingerprint,
        deadline_s=deadline.left_s,
    )
    heading = heading_of(http, endpoint.id_prefix, model, includes_usage=request.includes_usage)
    return Accepted(request, generate, model, heading, endpoint.shape(heading))


def _text_events(service: Service, accepted: Accepted, record: RequestRecord) -> AsyncGenerator[TextEvent, None]:
    sampling = accepted.generate.sampling
    detokenizer = accepted.model.tokenizer.detokenizer()
    return stream_text(
        service.engine.generate(accepted.generate),
        AnswerText(detokenizer, accepted.request.stops, sampling.stop_ids, sampling.min_tokens),
        max_silence_s=service.settings.max_silence_s,
        on_tokens=record.tokens_arrived,
    )


async def _whole(http: web.Request, service: Service, accepted: Accepted, record: RequestRecord) -> web.StreamResponse:
    texts: list[str] = []
    async with aclosing(_text_events(service, accepted, record)) as events:
        async for event in events:
            match event:
                case TextDelta(text):
                    texts.append(text)
                case TextEnd():
                    _note_end(http, accepted, record, event)
                    body = accepted.shape.whole("".join(texts), event.finish_reason, accepted.usage(event))
                    return web.Response(body=body, content_type="application/json", charset="utf-8")
    raise GenerationFailed("The answer ended without a reason.")


async def _stream(http: web.Request, service: Service, accepted: Accepted, record: RequestRecord) -> web.StreamResponse:
    stream = http[EVENT_STREAM] = EventStream(http, service.settings.write_timeout_s)
    buffer = EventBuffer(_text_events(service, accepted, record), service.settings.ping_interval_s)
    with closing(stream):
        async with buffer:
            end = await _send_all(stream, buffer, accepted)
    _note_end(http, accepted, record, end)
    assert stream.response is not None  # the end has been sent
    return stream.response


def _note_end(http: web.Request, accepted: Accepted, record: RequestRecord, end: TextEnd) -> None:
    record.ended(end)
    http[SPAN].answered(accepted.heading.id, accepted.model.card.model, end)


async def _send_all(stream: EventStream, buffer: EventBuffer[TextEvent], accepted: Accepted) -> TextEnd:
    """Write everything up to `[DONE]`; return the end."""
    payloads = accepted.shape.opening()
    while True:
        events = await buffer.take()
        if not events:
            await stream.ping()
            continue
        payloads += [accepted.shape.delta(event.text) for event in events if isinstance(event, TextDelta)]
        if isinstance(end := events[-1], TextEnd):
            await stream.send([*payloads, *_closing(accepted, end)])
            return end
        await stream.send(payloads)
        payloads = []


def _closing(accepted: Accepted, end: TextEnd) -> list[bytes]:
    usage = [accepted.shape.usage(accepted.usage(end))] if accepted.request.includes_usage else []
    return [accepted.shape.ending(end.finish_reason), *usage, DONE]
