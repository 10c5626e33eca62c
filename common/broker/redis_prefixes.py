"""What the prefix caches of decode workers have, in Redis; `place.lua` looks there."""

from collections.abc import Sequence
from typing import Final

from common.broker import scripts
from common.broker.connection import RedisConnection
from common.broker.keys import Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import PrefixNews
from common.messages.ids import Epoch, ModelName, WorkerId
from common.messages.prefixes import PromptPrefixes


class RedisPrefixIndex:
    """The caches of one model's workers; each is forgotten with its worker."""

    def __init__(self, connection: RedisConnection, model: ModelName, policy: BrokerPolicy) -> None:
        self._connection: Final = connection
        self._keys: Final = Keys(model)
        self._policy: Final = policy

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Take in what has changed; False: all are forgotten, as others were known than the worker believed."""
        ttl_ms = scripts.milliseconds(self._policy.stream_ttl_s)
        names = (*news.added, *news.removed)
        key = self._keys.prefixes(worker, epoch)
        answer = await self._connection.run(
            scripts.TELL_PREFIXES, (key,), ttl_ms, news.num_known, len(news.added), *names
        )
        return bool(answer)

    async def depths(self, workers: Sequence[tuple[WorkerId, Epoch]], prefixes: PromptPrefixes) -> list[int]:
        """Return how many of a prompt's prefixes each worker has; there is at least one of both."""
        keys = [self._keys.prefixes(*worker) for worker in workers]
        depths: list[int] = await self._connection.run(scripts.DEPTHS, keys, *reversed(prefixes.names))
        return depths
