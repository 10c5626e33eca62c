"""Registry over Redis: each beat writes all that others know about a worker, so a wiped Redis heals by itself."""

import logging
from typing import Final

from common.broker import scripts
from common.broker.connection import RedisConnection
from common.broker.keys import MODELS, Keys
from common.broker.policy import BrokerPolicy
from common.errors import MalformedRecord
from common.messages.codec import decode, encode
from common.messages.ids import Epoch, ModelName, WorkerId
from common.messages.registry import ModelCard, Role, WorkerLoad, WorkerRecord, WorkerState

logger = logging.getLogger(__name__)


class RedisRegistry:
    """Workers and card of one model."""

    def __init__(self, connection: RedisConnection, model: ModelName, policy: BrokerPolicy) -> None:
        self._connection: Final = connection
        self._model: Final = model
        self._keys: Final = Keys(model)
        self._policy: Final = policy
        self._card: bytes | None = None

    async def beat(self, record: WorkerRecord, load: WorkerLoad) -> None:
        """Register or renew a worker and move waiting jobs to it; a beat of an epoch that lost its seat is ignored."""
        keys = self._keys
        is_open = record.role is Role.DECODE and load.is_open
        num_busy = load.num_running + load.num_waiting + load.num_reserved
        answer = await self._connection.run(
            scripts.BEAT,
            (*keys.queue, *keys.lane(record.worker, record.epoch), keys.records, keys.loads, keys.card),
            *scripts.queue_limits(self._policy),
            record.worker,
            record.epoch,
            encode(record),
            encode(load),
            scripts.milliseconds(self._policy.worker_ttl_s),
            int(is_open),
            record.num_blocks,
            load.blocks_free,
            record.max_sequences - num_busy,
            num_busy,
            load.absorbed or "",
            scripts.milliseconds(self._policy.card_ttl_s),
            record.fingerprint,
        )
        if answer[0] == b"superseded":
            logger.error("beat ignored: another process has the seat", extra={"worker": record.worker})
            return
        if not answer[1] and self._card is not None:
            await self._write_card(self._card)
        await self._connection.run(
            scripts.ANNOUNCE, (MODELS,), self._model, scripts.milliseconds(self._policy.model_ttl_s)
        )

    async def leave(self, worker: WorkerId, epoch: Epoch) -> None:
        """Remove a worker and the jobs it has not read, unless its seat is taken by another epoch."""
        keys = (*self._keys.registry, *self._keys.lane(worker, epoch))
        await self._connection.run(scripts.LEAVE, keys, worker, str(epoch))

    async def workers(self) -> list[WorkerState]:
        """Return the live workers of the model."""
        flat = await self._connection.run(
            scripts.WORKERS, self._keys.registry, scripts.milliseconds(self._policy.worker_ttl_s)
        )
        states = []
        for record, load, age_ms in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
            try:
                state = WorkerState(decode(record, WorkerRecord), decode(load, WorkerLoad), age_ms / 1000)
            except MalformedRecord as error:
                logger.warning("worker of another version left out: %s", error)
            else:
                states.append(state)
        return states

    async def publish_card(self, card: ModelCard) -> None:
        """Make the model known to gateways; later beats keep the card alive and write it again if Redis lost it."""
        self._card = encode(card)
        await self._write_card(self._card)

    async def card(self) -> ModelCard | None:
        """Return the model's card, or None if no worker has published a readable one."""
        data = await self._connection.call("GET", self._keys.card)
        if data is None:
            return None
        try:
            return decode(data, ModelCard)
        except MalformedRecord as error:
            logger.warning("model card of another version ignored: %s", error)
            return None

    async def _write_card(self, card: bytes) -> None:
        await self._connection.call("SET", self._keys.card, card, "PX", scripts.milliseconds(self._policy.card_ttl_s))


class RedisModelIndex:
    """Which models a cluster has, over all their keys; owned by nobody, written by every worker's beat."""

    def __init__(self, connection: RedisConnection, policy: BrokerPolicy | None = None) -> None:
        self._connection: Final = connection
        self._policy: Final = policy or BrokerPolicy()

    async def models(self) -> list[ModelName]:
        """Return the models that had a worker lately, in alphabetical order."""
        names = await self._connection.run(scripts.MODELS, (MODELS,), scripts.milliseconds(self._policy.model_ttl_s))
        return sorted(ModelName(name.decode()) for name in names)
