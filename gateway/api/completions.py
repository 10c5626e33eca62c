"""`POST /v1/completions`."""

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.accepting import Accepted
from gateway.answer_parser import Content, Piece
from gateway.api.answers import answer
from gateway.api.bodies import parse_body
from gateway.api.heading import Heading
from gateway.api.shape import Endpoint, TextChunks, UsageSlot
from gateway.collection import WholeChoice
from gateway.logprobs import text_logprobs
from gateway.schemas.completions import TextChoice, TextCompletion, TextLogprobs
from gateway.schemas.usage import Timing, Usage
from gateway.sse import event_of
from gateway.text_stream import AnswerToken
from gateway.validation import parse_completion

_encode = msgspec.json.Encoder().encode


class CompletionShape:
    """Writes one text answer. Everything in it is content: there is no role, and no tool to call."""

    def __init__(self, heading: Heading, accepted: Accepted) -> None:
        form = accepted.request.form
        self._heading = heading
        self._tokenizer = accepted.model.tokenizer
        self._prompts = accepted.prompts
        self._num_choices = form.num_choices
        self._has_logprobs = form.num_logprobs is not None
        self._shows_ids = form.shows_token_ids
        self._text_chunks = TextChunks(lambda index, text: self._event((TextChoice(index, text),), heading.unused))
        self._opened: set[int] = set()

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken], usage: UsageSlot) -> bytes:
        """Return the chunk of more text and tokens."""
        text = "".join([piece.text for piece in pieces if isinstance(piece, Content)])
        if not tokens and not isinstance(usage, Usage):
            return self._text_chunks.chunk(index, text)
        return self._event((self._choice(index, text, None, tokens, is_first=index not in self._opened),), usage)

    def ending(self, index: int, reason: str, usage: UsageSlot, timing: Timing | UnsetType) -> bytes:
        """Return the last chunk of a choice."""
        return self._event((TextChoice(index, "", reason),), usage, timing)

    def closing(self, usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the chunk that holds the usage."""
        return self._event((), usage, timing)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the answer that is not streamed."""
        written = [
            self._choice(index, "".join(choice.content), choice.finish_reason, choice.tokens, is_first=True)
            for index, choice in enumerate(choices)
        ]
        return self._envelope(tuple(written), usage, timing)

    def _choice(
        self, index: int, text: str, reason: str | None, tokens: Sequence[AnswerToken], *, is_first: bool
    ) -> TextChoice:
        self._opened.add(index)
        prompt = self._prompts[index // self._num_choices]
        return TextChoice(
            index=index,
            text=text,
            finish_reason=reason,
            logprobs=self._logprobs(tokens),
            token_ids=[token.token_id for token in tokens] if self._shows_ids else UNSET,
            prompt_token_ids=list(prompt.generate.prompt_ids) if self._shows_ids and is_first else UNSET,
        )

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> TextLogprobs | None:
        return text_logprobs(tokens, self._tokenizer) if self._has_logprobs else None

    def _event(self, choices: tuple[TextChoice, ...], usage: UsageSlot, timing: Timing | UnsetType = UNSET) -> bytes:
        return event_of(self._envelope(choices, usage, timing))

    def _envelope(self, choices: tuple[TextChoice, ...], usage: UsageSlot, timing: Timing | UnsetType) -> bytes:
        head = self._heading
        return _encode(
            TextCompletion(
                id=head.id,
                object="text_completion",
                created=head.created,
                model=head.model,
                choices=choices,
                system_fingerprint=head.system_fingerprint,
                usage=usage,
                timing=timing,
            )
        )


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continue texts."""
    return await answer(http, await parse_body(http, parse_completion), Endpoint("cmpl", CompletionShape))
