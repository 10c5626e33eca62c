"""Thoughts that a model writes before its answer, between two markers: split off while they arrive.

White space beside the markers is part of neither. A marker that stands anywhere else is text.
"""

import enum
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gateway.markers import MAX_SPACE, before_marker, skip_space


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands before and behind the thoughts."""

    opener: str
    closer: str


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))


def markers_of(template: str, added_tokens: AbstractSet[str]) -> Markers | None:
    """Return a model's markers: its template shows them, or it has tokens for them. None: it does not think."""
    for markers in _KNOWN:
        if markers.closer in template or {markers.opener, markers.closer} <= added_tokens:
            return markers
    return None


def thoughts_rules(markers: Markers, *, is_open: bool, terminal: Callable[[str], str]) -> list[str]:
    """Return rules of Lark for `thoughts` with both their markers; unless they are open there may be none.

    `terminal` writes a marker: as text, or as a token of its own, which no pattern for text matches.
    """
    opener, closer = terminal(markers.opener), terminal(markers.closer)
    is_text = closer.startswith('"')
    thought = f"thought[suffix={closer}]: /(.|\\n)*/" if is_text else f"thought: /(.|\\n)*/ {closer}"
    space = r"/\n{0,2}/"
    return [f"thoughts: thought {space}" if is_open else f"thoughts: ({opener} thought {space})?", thought]


class _In(enum.Enum):
    """Where in the answer the next character stands."""

    START = enum.auto()
    OPENED = enum.auto()
    THOUGHTS = enum.auto()
    CLOSED = enum.auto()
    ANSWER = enum.auto()


class ThoughtSplitter:
    """Splits one answer. `is_open`: the prompt ends with the opener, so the answer begins with thoughts."""

    def __init__(self, markers: Markers, *, is_open: bool) -> None:
        self._markers = markers
        self._is_open = is_open
        self._in = _In.START
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return what the text adds for certain: to the thoughts, and to the answer behind them."""
        self._held += text
        if self._in is _In.START:
            self._start()
        thoughts = self._think() if self._in in (_In.OPENED, _In.THOUGHTS) else ""
        if self._in is _In.CLOSED:
            self._skip_space(_In.ANSWER)
        return thoughts, self._take() if self._in is _In.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """Return what was held back; thoughts without an end are thoughts."""
        is_thought = self._in in (_In.OPENED, _In.THOUGHTS) or (self._in is _In.START and self._is_open)
        return (self._take(), "") if is_thought else ("", self._take())

    def _start(self) -> None:
        """The opener may stand here, even if the prompt has one."""
        num_space, opener = skip_space(self._held), self._markers.opener
        begun = self._held[num_space:]
        if num_space <= MAX_SPACE and begun.startswith(opener):
            self._held = begun[len(opener) :]
            self._in = _In.OPENED
        elif num_space > MAX_SPACE or not opener.startswith(begun):
            self._in = _In.OPENED if self._is_open else _In.ANSWER

    def _think(self) -> str:
        if self._in is _In.OPENED:
            self._skip_space(_In.THOUGHTS)
        thoughts, end = before_marker(self._held, self._markers.closer)
        if end is None:
            self._held = self._held[len(thoughts) :]
        else:
            self._held = self._held[end:]
            self._in = _In.CLOSED
        return thoughts

    def _skip_space(self, behind: _In) -> None:
        self._held = self._held[skip_space(self._held) :]
        if self._held:
            self._in = behind

    def _take(self) -> str:
        taken, self._held = self._held, ""
        return taken
