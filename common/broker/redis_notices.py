"""The notice board of a cluster over one Redis stream, which every gateway reads for itself."""

from typing import Final

from common.broker import scripts
from common.broker.connection import RedisConnection, StreamVanished
from common.broker.entries import sort_out
from common.broker.keys import NOTICES
from common.broker.policy import BrokerPolicy
from common.broker.protocols import PostedNotice
from common.messages.codec import encode
from common.messages.ids import EntryId
from common.messages.notice import CancelNotice

NUM_PER_READ = 64


class RedisNoticeBoard:
    """What gateways tell all gateways."""

    def __init__(self, connection: RedisConnection, policy: BrokerPolicy | None = None) -> None:
        self._connection: Final = connection
        self._policy: Final = policy or BrokerPolicy()

    async def post(self, notice: CancelNotice) -> None:
        """Tell all gateways."""
        ttl_ms = scripts.milliseconds(self._policy.notice_ttl_s)
        await self._connection.run(scripts.POST_NOTICE, (NOTICES,), encode(notice), self._policy.max_notices, ttl_ms)

    async def newest(self) -> EntryId:
        """Return the entry behind which a reader begins that wants only what comes from now on."""
        entries = await self._connection.call("XREVRANGE", NOTICES, "+", "-", "COUNT", 1)
        return EntryId(entries[0][0].decode() if entries else "0-0")

    async def read(self, after: EntryId, block_s: float) -> list[PostedNotice]:
        """Return notices behind `after`, waiting up to `block_s` for the first one."""
        try:
            reply = await self._connection.read(block_s, "XREAD", "COUNT", NUM_PER_READ, streams=(NOTICES, after))
        except StreamVanished:  # deleted under the blocked read
            return []
        readable, malformed = sort_out(reply[0][1] if reply else [], "notice", CancelNotice)
        for entry in malformed:
            await self._connection.call("XDEL", NOTICES, entry)
        return [PostedNotice(entry, notice) for entry, notice in readable]
