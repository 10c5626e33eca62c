"""What the text of an answer means: content for the user, thoughts, calls of tools.

One parser per choice sees the choice's text in order, cut anywhere and without stop strings, and returns pieces of it.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec

from gateway.engine import FinishReason
from gateway.served_models import ServedModel


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of what the user is told; never empty."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers; never empty."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """More of a tool call. `id` and `name` come with the first delta of call number `index`, and with no other;
    `arguments` is the next piece of its JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Piece = Content | Reasoning | ToolCallDelta


class AnswerParser(Protocol):
    """Reads one choice."""

    @property
    def markers(self) -> AbstractSet[str]:
        """Special tokens that it must see in the text, though others are left out."""

    @property
    def is_over(self) -> bool:
        """Whether the rest of the text, if there is any, means nothing: it need not be generated."""

    def push(self, text: str) -> list[Piece]:
        """Return what the text adds for certain; `text` is never empty."""

    def finish(self, reason: FinishReason) -> tuple[list[Piece], str]:
        """Return what was held back, and the `finish_reason` that the client is told."""


class PlainAnswer:
    """All text is content."""

    markers: AbstractSet[str] = frozenset()
    is_over = False

    def push(self, text: str) -> list[Piece]:
        """Return the text as it is."""
        return [Content(text)]

    def finish(self, reason: FinishReason) -> tuple[list[Piece], str]:
        """Return nothing more, and the reason as it is."""
        return [], reason.value


MakeParser = Callable[[ServedModel, Sequence[int]], AnswerParser]
"""Makes the parser of one choice for the model that answers and the ids of the prompt; called once per choice."""
