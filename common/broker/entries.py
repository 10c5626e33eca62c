"""Entries of Redis streams and the records in them; an unreadable one never stops its reader."""

import logging

from common.errors import MalformedRecord
from common.messages.codec import RecordT, decode
from common.messages.ids import EntryId

logger = logging.getLogger(__name__)

RawEntry = tuple[bytes, list[bytes]]
"""Id, then field names and values in turn."""


def sort_out(
    entries: list[RawEntry], field: str, expected: type[RecordT]
) -> tuple[list[tuple[EntryId, RecordT]], list[EntryId]]:
    """Return the records in that field with their ids, and the ids of entries without one: to be deleted."""
    readable, malformed = [], []
    for raw_entry, fields in entries:
        entry = EntryId(raw_entry.decode())
        data = dict(zip(fields[0::2], fields[1::2], strict=True)).get(field.encode(), b"")
        try:
            readable.append((entry, decode(data, expected)))
        except MalformedRecord as error:
            logger.warning("stream entry dropped: %s", error, extra={"entry": entry})
            malformed.append(entry)
    return readable, malformed
