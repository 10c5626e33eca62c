"""A stream in memory: entries ordered by ids that only grow, and a bell for readers that wait."""

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from common.messages.ids import EntryId

ValueT = TypeVar("ValueT")

IdParts = tuple[int, int]


def id_parts(entry: EntryId) -> IdParts:
    """Return milliseconds and sequence number: ids compare by them, not as text."""
    ms, _, sequence = entry.partition("-")
    return int(ms), int(sequence)


class MemoryStream(Generic[ValueT]):
    """Entries of one stream, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[EntryId, ValueT] = {}
        self._last: IdParts = (0, 0)

    def __len__(self) -> int:
        """Entries that were not deleted."""
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryId]:
        """Ids, oldest first."""
        return iter(list(self._entries))

    def append(self, value: ValueT, now_s: float) -> EntryId:
        """Append an entry; its id is behind all earlier ones even if the clock steps back."""
        self._last = max((int(now_s * 1000), 0), (self._last[0], self._last[1] + 1))
        entry = EntryId(f"{self._last[0]}-{self._last[1]}")
        self._entries[entry] = value
        return entry

    def get(self, entry: EntryId) -> ValueT | None:
        """Return the value of an entry, None if it is not there."""
        return self._entries.get(entry)

    def values(self) -> list[ValueT]:
        """Return the values, oldest first."""
        return list(self._entries.values())

    def behind(self, entry: EntryId | None) -> list[tuple[EntryId, ValueT]]:
        """Return the entries behind `entry`, or all."""
        first = id_parts(entry) if entry is not None else (0, 0)
        return [item for item in self._entries.items() if id_parts(item[0]) > first]

    def delete(self, entry: EntryId) -> ValueT | None:
        """Delete an entry and return its value, None if it is not there."""
        return self._entries.pop(entry, None)

    def absorb(self, entry: EntryId) -> None:
        """Delete entries up to `entry`; later ones come behind it."""
        last = id_parts(entry)
        for older in [candidate for candidate in self._entries if id_parts(candidate) <= last]:
            del self._entries[older]
        self._last = max(self._last, last)


class Bell:
    """Wakes all that wait for something to arrive."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake those who wait now."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next ring, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return
