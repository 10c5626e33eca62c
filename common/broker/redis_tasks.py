"""Prefill tasks over a Redis stream with one consumer group: pulled by whoever has room, deleted by their authors."""

import logging
import time
from typing import Final

from common.broker import scripts
from common.broker.connection import RedisConnection, StreamVanished
from common.broker.entries import RawEntry, sort_out
from common.broker.keys import Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Delivery
from common.errors import BrokerUnavailable
from common.messages.codec import encode
from common.messages.ids import EntryId, Epoch, Fingerprint, ModelName, WorkerId
from common.messages.job import PrefillTask

logger = logging.getLogger(__name__)

FIRST_CURSOR = b"0-0"
NEVER_DELIVERED = b">"
"""Instead of an id: what no consumer of the group has got yet."""


class RedisTaskQueue:
    """Prefill tasks of one model and fingerprint."""

    def __init__(
        self, connection: RedisConnection, model: ModelName, fingerprint: Fingerprint, policy: BrokerPolicy
    ) -> None:
        self._connection: Final = connection
        self._stream: Final = Keys(model).prefill(fingerprint)
        self._policy: Final = policy
        self._newest = FIRST_CURSOR
        """The newest task that this process has got."""
        self._is_reply_lost = False

    async def publish(self, task: PrefillTask, replaces: EntryId | None = None) -> EntryId:
        """Append a task; delete the older try it replaces in the same step."""
        entry = await self._connection.run(
            scripts.PUBLISH_TASK, (self._stream,), encode(task), replaces or "", self._ttl_ms
        )
        return EntryId(entry.decode())

    async def claim(self, worker: WorkerId, epoch: Epoch, block_s: float) -> Delivery | None:
        """Take the oldest unclaimed task, waiting up to `block_s`.

        A task whose delivery was lost on its way, because the connection broke or we were paused, is found again here:
        to Redis it is ours already, so nobody else would be given it.
        """
        deadline = time.monotonic() + block_s
        while True:
            try:
                entries = await self._read_one(_consumer(worker, epoch), max(0.0, deadline - time.monotonic()))
            except StreamVanished:
                await self._connection.run(scripts.OPEN_GROUP, (self._stream,), self._ttl_ms)
                continue
            if not entries:
                return None
            self._newest = entries[-1][0]
            deliveries = await self._decoded(entries)
            if deliveries:
                return deliveries[0]

    async def claimer(self, entry: EntryId) -> tuple[WorkerId, Epoch] | None:
        """Return who has claimed a task that is still there, or None if nobody has."""
        consumer = await self._connection.run(scripts.CLAIMER, (self._stream,), entry)
        if consumer is None:
            return None
        worker, _, epoch = consumer.decode().rpartition(":")
        return WorkerId(worker), Epoch(int(epoch))

    async def delete(self, entry: EntryId) -> None:
        """Acknowledge and delete a task in one step; nothing happens if it is gone."""
        await self._connection.run(scripts.RETIRE_TASK, (self._stream,), entry)

    async def abandoned(self, worker: WorkerId, epoch: Epoch, min_idle_s: float) -> list[Delivery]:
        """Take over tasks that were claimed by anybody longer ago than `min_idle_s`.

        A task that was delivered too often is dropped instead: it kills its workers. Its author's timeout answers.
        """
        consumer = _consumer(worker, epoch)
        deliveries: list[Delivery] = []
        cursor = FIRST_CURSOR
        while True:
            cursor, entries, dropped = await self._connection.run(
                scripts.ABANDONED_TASKS,
                (self._stream,),
                consumer,
                scripts.milliseconds(min_idle_s),
                cursor,
                self._policy.max_deliveries,
            )
            for entry in dropped:
                logger.error("prefill task dropped: taken over too often", extra={"entry": entry.decode()})
            deliveries += await self._decoded(entries)
            if cursor == FIRST_CURSOR:
                break
        idle_ms = scripts.milliseconds(self._policy.consumer_idle_s)
        await self._connection.run(scripts.RETIRE_CONSUMERS, (self._stream,), consumer, idle_ms)
        return deliveries

    async def num_tasks(self) -> int:
        """Return how many tasks stand in the stream, claimed ones included."""
        return int(await self._connection.call("XLEN", self._stream))

    @property
    def _ttl_ms(self) -> int:
        return scripts.milliseconds(self._policy.task_ttl_s)

    async def _read_one(self, consumer: str, block_s: float) -> list[RawEntry]:
        if self._is_reply_lost:
            entries = await self._read_group(consumer, 0.0, self._newest)
            if entries:
                return entries
            self._is_reply_lost = False
        try:
            return await self._read_group(consumer, block_s, NEVER_DELIVERED)
        except StreamVanished:
            raise
        except BrokerUnavailable:
            self._is_reply_lost = True
            raise

    async def _read_group(self, consumer: str, block_s: float, after: bytes) -> list[RawEntry]:
        reply = await self._connection.read(
            block_s, "XREADGROUP", "GROUP", "prefill", consumer, "COUNT", 1, streams=(self._stream, after)
        )
        entries: list[RawEntry] = reply[0][1] if reply else []
        return entries

    async def _decoded(self, entries: list[RawEntry]) -> list[Delivery]:
        readable, malformed = sort_out(entries, "task", PrefillTask)
        if malformed:
            await self._connection.run(scripts.RETIRE_TASK, (self._stream,), *malformed)
        return [Delivery(entry, task) for entry, task in readable]


def _consumer(worker: WorkerId, epoch: Epoch) -> str:
    return f"{worker}:{epoch}"
