"""An answer's text out of its tokens: detokenised, cut at the first stop, with the counts for its usage.

The token that ends an answer is counted but never shown; tokens behind a stop string are neither.
"""

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from common.errors import DeadlineExceeded, GenerationFailed
from gateway.detokenizer import Detokenizer
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, TokenDelta
from gateway.patience import Patience
from gateway.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The answer is complete. `num_cached_tokens` of the prompt came from a prefix cache."""

    finish_reason: FinishReason
    num_tokens: int
    num_cached_tokens: int


TextEvent = TextDelta | TextEnd


class AnswerText:
    """The text of one answer so far. Stop strings count from token `min_tokens` on (the engine masks stop ids)."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str], stop_ids: Collection[int], min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens that count as generated."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that came from a prefix cache."""
        self.is_stopped = False
        """Whether a stop string or stop id has been met: nothing more is taken."""

    def push(self, delta: TokenDelta) -> str:
        """Return the text that the tokens add for certain; raises `GenerationFailed` if a token is missing."""
        if delta.index != self.num_tokens and not self.is_stopped:
            raise GenerationFailed(f"The token with index {self.num_tokens} is missing.")
        self.num_cached_tokens = delta.num_cached_tokens
        return "".join(self._push_one(token_id) for token_id in delta.token_ids)

    @property
    def has_stop_string(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher.has_matched

    def finish(self) -> str:
        """Return what was held back."""
        tail = self._matcher.push(self._detokenizer.finish()) + self._matcher.finish()
        self.is_stopped = self.is_stopped or self.has_stop_string
        return tail

    def _push_one(self, token_id: int) -> str:
        if self.is_stopped:
            return ""
        self.num_tokens += 1
        if token_id in self._stop_ids:
            self.is_stopped = True
            return ""
        text = self._detokenizer.push((token_id,))
        if self.num_tokens < self._min_tokens:
            return text
        shown = self._matcher.push(text)
        self.is_stopped = self._matcher.has_matched
        return shown


async def stream_text(
    events: AsyncGenerator[GenerateEvent, None],
    answer: AnswerText,
    *,
    max_silence_s: float,
    on_tokens: Callable[[int], None],
) -> AsyncGenerator[TextEvent, None]:
    """Yield the text, then one `TextEnd`, or raise what the engine raises. The engine's stream is closed in any case.

    `on_tokens` hears of newly counted tokens when they arrive. `DeadlineExceeded` after a silence of `max_silence_s`;
    `GenerationFailed` if the engine's stream stops without an end.
    """
    end: EndOfChoice | None = None
    with closing(Patience(max_silence_s)) as patience:
        async with aclosing(events):
            while end is None and not answer.has_stop_string:
                event = await _next(events, patience)
                match event:
                    case TokenDelta():
                        num_before = answer.num_tokens
                        text = answer.push(event)
                        if answer.num_tokens > num_before:
                            on_tokens(answer.num_tokens - num_before)
                        if text:
                            yield TextDelta(text)
                    case EndOfChoice():
                        end = event
                        answer.num_cached_tokens = end.num_cached_tokens
                    case None:
                        raise GenerationFailed("The answer ended without a reason.")
    tail = "" if answer.has_stop_string else answer.finish()
    if tail:
        yield TextDelta(tail)
    yield TextEnd(_finish_reason(answer, end), answer.num_tokens, answer.num_cached_tokens)


async def _next(events: AsyncGenerator[GenerateEvent, None], patience: Patience) -> GenerateEvent | None:
    """Return the next event, None if there is none."""
    try:
        with patience:
            return await anext(events, None)
    except TimeoutError as error:
        if patience.is_over:
            raise DeadlineExceeded("No token came for too long.") from error
        raise


def _finish_reason(answer: AnswerText, end: EndOfChoice | None) -> FinishReason:
    """A stop on the last allowed token is still a stop: it says more than the limit."""
    return FinishReason.STOP if answer.is_stopped or end is None else end.finish_reason
