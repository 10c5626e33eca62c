"""An answer as messages of `tandem.v1.Generation/Generate`."""

from collections.abc import Iterator, Sequence

from msgspec import structs

from common.messages.ids import RequestId
from gateway.answer import Answer
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Content, Piece, Reasoning
from gateway.logprobs import chat_name, finite
from gateway.outbox import Outbox
from gateway.schemas.usage import Timing
from gateway.serving import Serving
from gateway.text_stream import AnswerToken
from gateway.tokenizer import ModelTokenizer
from proto.tandem.v1 import generate_pb2 as pb


def started(request: RequestId, served: Serving) -> pb.GenerateResponse:
    """Return the first message of an answer."""
    accepted = served.accepted
    num_prompt_tokens = sum(len(prompt.generate.prompt_ids) for prompt in accepted.prompts)
    message = pb.Started(id=request, model=accepted.model.card.model, num_prompt_tokens=num_prompt_tokens)
    return pb.GenerateResponse(started=message)


class MessageSink:
    """An `AnswerSink` that puts messages into an outbox, up to and including the usage."""

    def __init__(self, served: Serving, outbox: Outbox[pb.GenerateResponse], *, shows_text: bool) -> None:
        form = served.accepted.request.form
        self._served = served
        self._outbox = outbox
        self._shows_text = shows_text
        self._shows_ids = form.shows_token_ids
        self._has_logprobs = form.num_logprobs is not None
        self._tokenizer = served.accepted.model.tokenizer
        self._answer: Answer

    def start(self, answer: Answer) -> None:
        """Count with that answer."""
        self._answer = answer

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        """Take more of a choice."""
        delta = pb.Delta(choice=index)
        if self._shows_text:
            delta.text = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
            delta.reasoning = "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)])
        if self._shows_ids:
            delta.token_ids.extend(token.token_id for token in tokens)
        if self._has_logprobs:
            delta.logprobs.extend(_token(token, self._tokenizer) for token in tokens)
        if delta.text or delta.reasoning or delta.token_ids or delta.logprobs:
            self._outbox.put(pb.GenerateResponse(delta=delta))

    def end(self, choice: AnswerChoice) -> None:
        """Take the end of a choice; the usage follows the last one."""
        finished = pb.Finished(choice=choice.index, reason=choice.finish_reason)
        self._outbox.put(pb.GenerateResponse(finished=finished))
        if self._answer.is_over:
            self._outbox.put(pb.GenerateResponse(usage=self._usage()))

    @property
    def is_full(self) -> bool:
        """Whether the client is so far behind that no more should be generated."""
        return self._outbox.is_full

    async def room(self) -> None:
        """Wait for the client."""
        await self._outbox.room()

    def _usage(self) -> pb.Usage:
        usage = self._answer.usage
        message = pb.Usage(
            num_prompt_tokens=usage.prompt_tokens,
            num_generated_tokens=usage.completion_tokens,
            num_cached_tokens=usage.prompt_tokens_details.cached_tokens,
        )
        if self._served.accepted.request.form.includes_timing:
            message.timing.CopyFrom(_timing(self._served.record.timing(self._answer.times)))
        return message


def merged(messages: Sequence[pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
    """Yield the messages; deltas of one choice that follow each other become one."""
    last: pb.GenerateResponse | None = None
    for message in messages:
        if last is None:
            last = message
        elif _continues(last, message):
            last.delta.text += message.delta.text
            last.delta.reasoning += message.delta.reasoning
            last.delta.token_ids.extend(message.delta.token_ids)
            last.delta.logprobs.extend(message.delta.logprobs)
        else:
            yield last
            last = message
    if last is not None:
        yield last


def _continues(last: pb.GenerateResponse, message: pb.GenerateResponse) -> bool:
    are_deltas = last.HasField("delta") and message.HasField("delta")
    return are_deltas and last.delta.choice == message.delta.choice


def _token(token: AnswerToken, tokenizer: ModelTokenizer) -> pb.TokenLogprob:
    assert token.logprobs is not None  # nothing is echoed, and every generated token has them
    return pb.TokenLogprob(
        token_id=token.token_id,
        token=chat_name(tokenizer.bytes_of(token.token_id)),
        logprob=finite(token.logprobs.logprob),
        top=[_alternative(token_id, logprob, tokenizer) for token_id, logprob in token.logprobs.top],
    )


def _alternative(token_id: int, logprob: float, tokenizer: ModelTokenizer) -> pb.Alternative:
    return pb.Alternative(token_id=token_id, token=chat_name(tokenizer.bytes_of(token_id)), logprob=finite(logprob))


def _timing(timing: Timing) -> pb.Timing:
    return pb.Timing(**{name: seconds for name, seconds in structs.asdict(timing).items() if seconds is not None})
