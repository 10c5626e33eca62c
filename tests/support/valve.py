"""Holds the steps of an engine thread until a test lets them run."""

import threading

from common.scheduling.sequence import SequenceKey

ENTRY_TIMEOUT_S = 30.0
Span = tuple[SequenceKey, int, int]
"""Sequence, first token and number of tokens of a chunk."""


class Valve:
    """Open at first. The engine thread calls `enter`, the test everything else."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_allowed: int | None = None
        self._error: BaseException | None = None
        self.is_holding = False
        """A step stands before the closed valve."""
        self.spans: list[Span] = []
        """Every chunk computed so far."""

    def close(self) -> None:
        """Let no step begin."""
        with self._condition:
            self._num_allowed = 0

    def let(self, num_steps: int = 1) -> None:
        """Let so many more steps begin."""
        with self._condition:
            self._num_allowed = (self._num_allowed or 0) + num_steps
            self._condition.notify_all()

    def open(self) -> None:
        """Let every step begin."""
        with self._condition:
            self._num_allowed = None
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let the next step raise."""
        self._error = error
        self.open()

    def computed(self, request: str) -> list[tuple[int, int]]:
        """Return start and length of the chunks computed for a request."""
        return [(start, length) for key, start, length in self.spans if key.request == request]

    def enter(self, spans: list[Span]) -> None:
        """Begin a step when that is allowed."""
        with self._condition:
            self.is_holding = self._num_allowed == 0
            may_begin = self._condition.wait_for(lambda: self._num_allowed != 0, ENTRY_TIMEOUT_S)
            assert may_begin, "nobody has opened the valve"
            self.is_holding = False
            if self._num_allowed is not None:
                self._num_allowed -= 1
        if self._error is not None:
            raise self._error
        self.spans += spans
