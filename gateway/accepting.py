"""From a valid request to what its model's engine is asked: model, token ids, settled sampling, all prompts or none."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.messages.ids import RequestId
from common.telemetry.traces import Stage
from gateway.deadline import Deadline
from gateway.echo import Echo, echo_of
from gateway.engine import GenerateRequest
from gateway.metering import Metering
from gateway.prompts import encode_prompts
from gateway.request_ids import part_of
from gateway.request_record import RequestRecord
from gateway.sampling import random_seed, settle_sampling
from gateway.served_models import ServedModel
from gateway.service import Service
from gateway.spans import RequestSpan
from gateway.validation import Prompt, ValidRequest

LONG_ECHO_TOKENS = 1000
"""Finding the offsets of this many tokens takes about 1 ms, what a thread's turn costs."""

MAX_ECHOED_TOKENS = 131_072
"""Tokens of prompts that one request may have repeated, once per choice: with logprobs these are some 30 MB of JSON."""


@dataclass(frozen=True, slots=True)
class AcceptedPrompt:
    """One prompt with what the engine is asked. `echo` None: its answers begin behind it."""

    generate: GenerateRequest
    echo: Echo | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request with everything that its answer needs; there is at least one prompt."""

    request: ValidRequest
    model: ServedModel
    prompts: tuple[AcceptedPrompt, ...]

    @property
    def tells_tokens(self) -> bool:
        """Whether the client is told of single tokens beside the text."""
        return self.request.form.num_logprobs is not None or self.request.form.shows_token_ids


async def accept(
    service: Service,
    request: ValidRequest,
    request_id: RequestId,
    span: RequestSpan,
    deadline: Deadline,
    record: RequestRecord,
    metering: Metering,
) -> Accepted:
    """Return the request ready for the engine; raises what is wrong with it, with any of its prompts, or `RateLimited`
    if these are longer than its body let expect."""
    model = await service.models.get(request.model)
    with span.stage(Stage.TOKENIZE), record.timed(Stage.TOKENIZE):
        prompts_ids = await encode_prompts(request.prompts, model, service.models)
    await metering.settle(sum(map(len, prompts_ids)))
    grammar = None if request.grammar is None else await request.grammar.compile(model, service.models, prompts_ids[0])
    seed = request.sampling.seed if request.sampling.seed is not None else random_seed()
    samplings = [settle_sampling(request, model.card, len(ids), seed, grammar) for ids in prompts_ids]
    num_tokens = record.num_prompt_tokens = sum(map(len, prompts_ids))
    record.model = model.card.model
    span.asked(request.prompts[0].operation, model.card.model, samplings[0], num_tokens)
    traceparent, tracestate, deadline_s = span.traceparent, span.tracestate, deadline.left_s
    asked = [
        GenerateRequest(
            request=part_of(request_id, index),
            model=request.model,
            prompt_ids=ids,
            sampling=sampling,
            cache_salt=request.cache_salt,
            traceparent=traceparent,
            tracestate=tracestate,
            fingerprint=model.card.fingerprint,
            deadline_s=deadline_s,
            num_choices=request.form.num_generated,
            tenant=metering.caller.tenant,
            weight=metering.caller.weight,
            priority=metering.caller.priority(request.sampling.priority),
            vocab_size=model.card.vocab_size,
        )
        for index, (ids, sampling) in enumerate(zip(prompts_ids, samplings, strict=True))
    ]
    echoes = await _echoes(service, request, prompts_ids, model)
    return Accepted(request, model, tuple(map(AcceptedPrompt, asked, echoes)))


async def _echoes(
    service: Service, request: ValidRequest, prompts_ids: Sequence[Sequence[int]], model: ServedModel
) -> Sequence[Echo | None]:
    form = request.form
    if not form.echoes:
        return (None,) * len(prompts_ids)
    num_tokens = sum(map(len, prompts_ids))
    if num_tokens * form.num_generated > MAX_ECHOED_TOKENS:
        raise InvalidRequest(
            f"`echo` would repeat {num_tokens * form.num_generated} tokens of prompts, above {MAX_ECHOED_TOKENS}.",
            param="echo",
        )

    def echo(prompt: Prompt, ids: Sequence[int]) -> Echo:
        has_tokens = form.num_logprobs is not None or form.shows_token_ids
        return echo_of(prompt, ids, model, skips_special=form.skips_special, has_tokens=has_tokens)

    def all_of_them() -> list[Echo]:
        return list(map(echo, request.prompts, prompts_ids))

    if num_tokens <= LONG_ECHO_TOKENS:
        return all_of_them()
    return await service.models.run(all_of_them)
