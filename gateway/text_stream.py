"""The text of one choice out of its tokens: detokenised, cut at the first stop, with the counts for its usage.

The token that ends an answer is counted but not shown, unless the client wants to see it; tokens behind a stop string
are neither. Tokens are told (for logprobs, or as ids) when they arrive, one for each that is counted and shown or might
have been: text that is held back because half a character or half a stop string is missing follows them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import GenerationFailed
from common.messages.logprobs import TokenLogprobs
from gateway.detokenizer import Detokenizer
from gateway.engine import TokenDelta
from gateway.stop import StopMatcher


class AnswerToken(NamedTuple):
    """One token as its client may be told of it.

    `offset` is the place of its text, in characters of the choice's text with nothing held back. `logprobs` is None if
    they were not asked for, and for the first token of a prompt.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a text. Stop strings count from token `min_tokens` on (the engine masks stop ids)."""

    strings: Sequence[str] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    is_shown: bool = False


class AnswerText:
    """The text of one choice so far. `on_token` hears of every token."""

    def __init__(
        self, detokenizer: Detokenizer, rules: StopRules, on_token: Callable[[AnswerToken], None] | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.strings, shows_stop=rules.is_shown)
        self._on_token = on_token
        self._stop_ids = rules.token_ids
        self._is_free = not rules.strings and on_token is None
        self._is_watched = on_token is not None or rules.min_tokens > 0
        """Whether a token is more than its text: it is told, or a stop may not count yet."""
        self._num_chars = 0
        self.num_tokens = 0
        """Tokens that count as generated."""
        self.sum_logprobs = 0.0
        """Of those tokens, as far as they were asked for."""
        self.is_stopped = False
        """Whether a stop string or stop id has been met: nothing more is taken."""
        self.has_stop_string = False
        """Whether a stop string has ended the text."""

    def start_behind(self, num_chars: int) -> None:
        """The offsets of tokens count from so many characters on."""
        self._num_chars = num_chars

    def push(self, delta: TokenDelta) -> str:
        """Return the text that the tokens add for certain; raises `GenerationFailed` if a token is missing."""
        if self.is_stopped:
            return ""
        if delta.index != self.num_tokens:
            raise GenerationFailed(f"The token with index {self.num_tokens} is missing.")
        token_ids = delta.token_ids
        is_lone = len(token_ids) == 1
        if (self._is_free or (is_lone and not self._is_watched)) and self._stop_ids.isdisjoint(token_ids):
            self.num_tokens += len(token_ids)
            if delta.logprobs:
                self.sum_logprobs += sum(entry.logprob for entry in delta.logprobs)
            text = self._detokenizer.push(token_ids)
            return text if self._is_free else self._matched(text)
        if is_lone:
            return self._push_one(delta, 0)
        return "".join([self._push_one(delta, place) for place in range(len(token_ids))])

    def finish(self) -> str:
        """Return what was held back."""
        if self.has_stop_string:
            return ""
        return self._matched(self._detokenizer.finish()) + self._matcher.finish()

    def _matched(self, text: str) -> str:
        """Return what of more text is shown for certain, up to a stop string."""
        shown = self._matcher.push(text)
        if self._matcher.has_matched:
            self.has_stop_string = self.is_stopped = True
        return shown

    def _push_one(self, delta: TokenDelta, place: int) -> str:
        if self.is_stopped:
            return ""
        token_id = delta.token_ids[place]
        logprobs = delta.logprobs[place] if delta.logprobs else None
        self.num_tokens += 1
        self.sum_logprobs += logprobs.logprob if logprobs is not None else 0.0
        self.is_stopped = token_id in self._stop_ids
        if self.is_stopped and not self._rules.is_shown:
            return ""
        if self._on_token is not None:
            self._on_token(AnswerToken(token_id, self._num_chars, logprobs))
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        return text if self.num_tokens < self._rules.min_tokens else self._matched(text)
