"""What the answer of a chat means: the model's thoughts, then content and calls of tools."""

import secrets
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from gateway.answer_parser import AnswerParser, Content, Piece, PlainAnswer, Reasoning
from gateway.engine import FinishReason
from gateway.reasoning import Markers, ThoughtSplitter, markers_of
from gateway.served_models import ServedModel
from gateway.tools.call_parser import CallParser, Reader
from gateway.tools.call_reader import CallReader
from gateway.tools.framing import OBJECT, CallIds, Framing, FunctionXml, framing_of
from gateway.tools.function_xml import FunctionXmlReader
from gateway.tools.request import ToolUse

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls."""

_PROMPT_TAIL = 16
"""So many tokens at the end of a prompt are looked at: more than an opener and the white space behind it."""

_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ChatAnswer:
    """Reads one choice. A `splitter` of None: the model does not think; `calls` of None: it calls nothing."""

    def __init__(
        self,
        splitter: ThoughtSplitter | None,
        calls: CallParser | None,
        *,
        shows_thoughts: bool = True,
        markers: AbstractSet[str] = frozenset(),
    ) -> None:
        self._splitter = splitter
        self._calls = calls
        self._shows_thoughts = shows_thoughts
        self.markers = markers

    @property
    def is_over(self) -> bool:
        """Whether every call that is wanted has been made."""
        return self._calls is not None and self._calls.is_over

    def push(self, text: str) -> list[Piece]:
        """Return what the text adds for certain."""
        if self._splitter is None:
            return self._told("", text)
        return self._told(*self._splitter.push(text))

    def finish(self, reason: FinishReason) -> tuple[list[Piece], str]:
        """Return what was held back, and why the answer ended: a call that came to its end is a reason of its own."""
        pieces = [] if self._splitter is None else self._told(*self._splitter.finish())
        if self._calls is None:
            return pieces, reason.value
        pieces += self._calls.finish()
        has_called = self._calls.num_calls > 0 and reason is FinishReason.STOP
        return pieces, TOOL_CALLS if has_called else reason.value

    def _told(self, thoughts: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(thoughts)] if thoughts and self._shows_thoughts else []
        if answer:
            pieces += [Content(answer)] if self._calls is None else self._calls.push(answer)
        return pieces


@dataclass(frozen=True, slots=True)
class ThoughtsAhead:
    """An answer may begin with thoughts; it does if they are open, because the prompt ends with the opener."""

    markers: Markers
    is_open: bool


@dataclass(frozen=True, slots=True)
class ChatAnswers:
    """Makes the parsers of a request. `tools` None: nothing may be called."""

    tools: ToolUse | None
    shows_thoughts: bool = True

    def __call__(self, model: ServedModel, prompt_ids: Sequence[int]) -> AnswerParser:
        """Return the parser of one choice."""
        thoughts = thoughts_ahead(model, prompt_ids)
        if thoughts is None and self.tools is None:
            return PlainAnswer()
        splitter = calls = None
        markers: set[str] = set()
        if thoughts is not None:
            splitter = ThoughtSplitter(thoughts.markers, is_open=thoughts.is_open)
            markers |= {thoughts.markers.opener, thoughts.markers.closer}
        if self.tools is not None:
            framing = call_framing(model, self.tools)
            calls = _call_parser(self.tools, framing)
            markers |= {framing.opener, framing.closer}
        return ChatAnswer(splitter, calls, shows_thoughts=self.shows_thoughts, markers=markers)


def call_framing(model: ServedModel, tools: ToolUse) -> Framing | FunctionXml:
    """Return how the model writes calls; one that is not known to write any, or none of which grammars are written, is
    made to write an object.
    """
    known = framing_of(model.card.chat_template or "") or OBJECT
    return OBJECT if isinstance(known, FunctionXml) and tools.is_forced else known


def thoughts_ahead(model: ServedModel, prompt_ids: Sequence[int]) -> ThoughtsAhead | None:
    """Return how the answer's thoughts begin, None: the model does not think, or the prompt ends them."""
    markers = markers_of(model.card.chat_template or "", model.tokenizer.added_tokens)
    if markers is None:
        return None
    tail = model.tokenizer.decode(prompt_ids[-_PROMPT_TAIL:], skips_special=False).rstrip()
    return None if tail.endswith(markers.closer) else ThoughtsAhead(markers, is_open=tail.endswith(markers.opener))


def _call_parser(tools: ToolUse, framing: Framing | FunctionXml) -> CallParser:
    return CallParser(framing, reader_of(framing, tools), partial(_make_id, framing.ids), tools.max_calls)


def reader_of(framing: Framing | FunctionXml, tools: ToolUse) -> Callable[[], Reader]:
    """Return what makes readers of calls of these tools."""
    if isinstance(framing, FunctionXml):
        return partial(FunctionXmlReader, {function.name: function for function in tools.functions})
    return partial(CallReader, tools.names)


def _make_id(kind: CallIds) -> str:
    match kind:
        case CallIds.OPENAI:
            return f"call_{secrets.token_hex(12)}"
        case CallIds.NINE_CHARACTERS:
            return "".join(secrets.choice(_CHARACTERS) for _ in range(9))
