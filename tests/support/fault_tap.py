"""Tells which request of a gateway is whose: reads along what the gateway writes to Redis.

Clients choose a salt, gateways choose the id; a job holds both.
"""

import re
from collections.abc import Callable

from common.messages.codec import decode
from common.messages.job import Job
from tests.support.polling import until

SALT_PREFIX = "fault-"
_SALT = re.compile(rb"fault-[0-9a-f]{16}")
_LENGTH = re.compile(rb"\$(\d{1,5})\r\n")
_TAIL_BYTES = 1 << 15
"""Longer than any job: what comes before its salt must still be here when the salt comes."""


class Tap:
    """Ids of the requests that have been placed, by salt."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._salts: dict[str, str] = {}
        self.jobs: dict[str, bytes] = {}
        """The first job of each request, as it was written, by salt."""

    def look(self) -> Callable[[bytes], None]:
        """Return who looks at one connection's way to Redis."""
        seen = bytearray()

        def look(chunk: bytes) -> None:
            seen.extend(chunk)
            while (salt := _SALT.search(seen)) is not None:
                job = _argument_around(bytes(seen), salt.start())
                if job is None:
                    return  # the rest of the command is still to come
                self._note(salt.group().decode(), job)
                del seen[: salt.end()]
            del seen[:-_TAIL_BYTES]

        return look

    def salt_of(self, request: str) -> str | None:
        """Return the salt of a request, None if it is nobody's of ours."""
        return self._salts.get(request)

    async def id_of(self, salt: str, deadline_s: float = 10.0) -> str:
        """Wait until a gateway places the request with this salt; return its id."""
        await until(lambda: salt in self._ids, f"the request {salt} is placed", deadline_s)
        return self._ids[salt]

    def _note(self, salt: str, job: bytes) -> None:
        request = decode(job, Job).request
        self._ids.setdefault(salt, request)
        self._salts.setdefault(request, salt)
        self.jobs.setdefault(salt, job)


def _argument_around(data: bytes, position: int) -> bytes | None:
    """Return the argument of a Redis command in which `position` lies, None if its end is still missing."""
    for header in reversed(list(_LENGTH.finditer(data, 0, position))):
        end = header.end() + int(header.group(1))
        if end > len(data) - 2:
            return None
        if end > position and data[end : end + 2] == b"\r\n":
            return data[header.end() : end]
    raise AssertionError("a job that does not begin where it should")
