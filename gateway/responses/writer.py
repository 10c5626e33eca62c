"""One response from its beginning to its end: what is told at every moment, and how it came out."""

import itertools
import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType, structs

from gateway.accepting import Accepted
from gateway.answer_parser import Piece
from gateway.engine import FinishReason
from gateway.logprobs import chat_logprobs
from gateway.responses.output import Output
from gateway.schemas.errors import ErrorDetail
from gateway.schemas.responses import (
    ErrorEvent,
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseRequest,
    ResponseUsage,
    TextFormat,
    ToldReasoning,
    ToldText,
)
from gateway.schemas.usage import Timing, Usage
from gateway.text_stream import AnswerToken


class ResponseWriter:
    """Makes the events of one response. `response` is what has been made of it so far."""

    def __init__(self, response_id: str, request: ResponseRequest, accepted: Accepted) -> None:
        self._number = itertools.count().__next__
        tokenizer = accepted.model.tokenizer
        has_logprobs = accepted.request.form.num_logprobs is not None
        self._output = Output(
            response_id,
            self._number,
            (lambda tokens: chat_logprobs(tokens, tokenizer).content) if has_logprobs else None,
        )
        self._has_begun = False
        self.response = _begun(response_id, request, accepted)

    def delta(self, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> Iterator[Event]:
        """Yield the events of more of the answer."""
        yield from self._beginning()
        yield from self._output.add(pieces, tokens)

    def end(self, reason: FinishReason, usage: Usage, timing: Timing | UnsetType = UNSET) -> Iterator[Event]:
        """Yield the last events of an answer that has ended for that reason."""
        yield from self._beginning()
        is_cut = reason is FinishReason.LENGTH
        yield from self._output.finish(is_cut=is_cut)
        self.response = structs.replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails() if is_cut else None,
            output=tuple(self._output.items),
            usage=_usage(usage),
            timing=timing,
        )
        last = ResponseIncomplete if is_cut else ResponseCompleted
        yield last(self._number(), self.response)

    def failure(self, error: ErrorDetail) -> Event:
        """Return the last event of an answer that broke off, or never began."""
        if not self._has_begun:
            return ErrorEvent(self._number(), error.message, error.code, error.param)
        failed = structs.replace(
            self.response, status="failed", error=ResponseFailure(error.message), output=tuple(self._output.items)
        )
        return ResponseFailed(self._number(), failed)

    def _beginning(self) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield ResponseCreated(self._number(), self.response)
            yield ResponseInProgress(self._number(), self.response)


def _begun(response_id: str, request: ResponseRequest, accepted: Accepted) -> Response:
    sampling = accepted.prompts[0].generate.sampling
    text_format = None if request.text is None else request.text.format
    return Response(
        id=response_id,
        created_at=int(time.time()),
        model=accepted.model.card.model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=ToldReasoning(None if request.reasoning is None else request.reasoning.effort),
        temperature=sampling.temperature,
        text=ToldText(text_format or TextFormat()),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
    )


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(0 if details is UNSET else details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
