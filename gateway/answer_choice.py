"""One choice of an answer: from the engine's tokens to typed pieces of text, and to its one end."""

from collections.abc import Callable, Sequence

from gateway.answer_parser import AnswerParser, Content, Piece, Reasoning
from gateway.engine import EndOfChoice, FinishReason, TokenDelta
from gateway.request_record import NOT_YET
from gateway.text_stream import AnswerText, AnswerToken

Send = Callable[[int, Sequence[Piece], Sequence[AnswerToken]], None]
"""Takes more of the choice of that number; pieces or tokens may be none, but not both."""


class AnswerChoice:
    """Owned by its answer. `tokens` is where `text` puts the tokens that the client wants to be told, None: nowhere.

    A hidden choice shows nothing of what is generated, and counts none of it.
    """

    def __init__(
        self,
        index: int,
        text: AnswerText,
        parser: AnswerParser,
        send: Send,
        *,
        tokens: list[AnswerToken] | None = None,
        is_hidden: bool = False,
    ) -> None:
        self.index = index
        self._text = text
        self._parser = parser
        self._send_on = send
        self._tokens = tokens
        self._is_hidden = is_hidden
        self.finish_reason = ""
        """What the client is told; empty while the choice is open."""
        self.num_reasoning_tokens = 0
        """Generated tokens up to the last ones that added to its thoughts."""
        self.is_open = True
        """Whether more of it is to come."""
        self.last_token_s = NOT_YET
        """When its last tokens came."""
        self.reason = FinishReason.STOP
        """Why it ended, once it has."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count as generated."""
        return 0 if self._is_hidden else self._text.num_tokens

    @property
    def mean_logprob(self) -> float:
        """Of the generated tokens, if their logprobs were asked for."""
        return self._text.sum_logprobs / max(self._text.num_tokens, 1)

    def echo(self, text: str, tokens: Sequence[AnswerToken]) -> None:
        """Begin with a piece of the prompt."""
        if text or tokens:
            self._send_on(self.index, [Content(text)] if text else [], tokens)

    def take(self, delta: TokenDelta) -> int:
        """Take more tokens; return how many of them count."""
        num_before = self._text.num_tokens
        text = self._text.push(delta)
        if self._is_hidden:
            return 0
        if self._tokens:
            self._send(self._parser.push(text) if text else [])
        elif text and (pieces := self._parser.push(text)):
            if type(pieces[0]) is Reasoning:
                self.num_reasoning_tokens = self._text.num_tokens
            self._send_on(self.index, pieces, ())
        if self._text.has_stop_string or self._parser.is_over:
            self._finish(FinishReason.STOP)
        return self._text.num_tokens - num_before

    def close(self, end: EndOfChoice) -> None:
        """The engine has no more. A stop on the last allowed token is still a stop: it says more than the limit."""
        tail = self._text.finish()
        if self._is_hidden:
            self._finish(FinishReason.LENGTH)
            return
        if tail:
            self._send(self._parser.push(tail))
        self._finish(FinishReason.STOP if self._text.is_stopped else end.finish_reason)

    def _send(self, pieces: Sequence[Piece]) -> None:
        if pieces and type(pieces[0]) is Reasoning:
            self.num_reasoning_tokens = self._text.num_tokens
        tokens: Sequence[AnswerToken] = ()
        if self._tokens:
            tokens = tuple(self._tokens)
            self._tokens.clear()
        if pieces or tokens:
            self._send_on(self.index, pieces, tokens)

    def _finish(self, reason: FinishReason) -> None:
        pieces, self.finish_reason = self._parser.finish(reason)
        self.reason, self.is_open = reason, False
        self._send(pieces)
