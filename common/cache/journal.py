"""What came into a prefix cache and what left it, for whoever tells others.

The cache's thread writes, one other thread takes; each entry is taken once. It is bounded: if nobody takes for long,
the oldest entries are lost, and others hear of a prefix too many or too few, which costs time and nothing else.
"""

from collections import deque
from collections.abc import Iterator

MAX_ENTRIES = 1 << 16
"""More than a pool of a million tokens changes in a second."""


class PrefixJournal:
    """Short names of prefixes, each with whether it is there now."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: deque[tuple[bytes, bool]] = deque(maxlen=max_entries)

    def note(self, name: bytes, *, is_there: bool) -> None:
        """A prefix has come or gone."""
        self._entries.append((name, is_there))

    def take(self) -> Iterator[tuple[bytes, bool]]:
        """Yield what was noted since, oldest first."""
        while self._entries:
            yield self._entries.popleft()
