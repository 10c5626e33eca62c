"""What the prefix caches of decode workers have, in memory."""

from collections.abc import Callable, Sequence

from common.broker.policy import BrokerPolicy
from common.broker.protocols import PrefixNews
from common.messages.ids import Epoch, WorkerId
from common.messages.prefixes import PromptPrefixes


class MemoryPrefixIndex:
    """The caches of one model's workers, each forgotten when nothing was heard of it for the life of a stream."""

    def __init__(self, clock: Callable[[], float], policy: BrokerPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._names: dict[tuple[WorkerId, Epoch], set[bytes]] = {}
        self._expires_s: dict[tuple[WorkerId, Epoch], float] = {}

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Take in what has changed; False: all are forgotten, as others were known than the worker believed."""
        known = self._known(worker, epoch)
        if len(known) != news.num_known:
            self.forget(worker, epoch)
            return False
        self._names[worker, epoch] = (known | set(news.added)) - set(news.removed)
        self.renew(worker, epoch)
        return True

    def renew(self, worker: WorkerId, epoch: Epoch) -> None:
        """The worker has beaten."""
        self._expires_s[worker, epoch] = self._clock() + self._policy.stream_ttl_s

    def forget(self, worker: WorkerId, epoch: Epoch) -> None:
        """The worker has left."""
        self._names.pop((worker, epoch), None)
        self._expires_s.pop((worker, epoch), None)

    async def depths(self, workers: Sequence[tuple[WorkerId, Epoch]], prefixes: PromptPrefixes) -> list[int]:
        """Return how many of a prompt's prefixes each worker has."""
        return [self._depth(worker, epoch, prefixes) for worker, epoch in workers]

    def num_cached(self, worker: WorkerId, epoch: Epoch, prefixes: PromptPrefixes) -> int:
        """Return how many tokens of a prompt the worker has."""
        return prefixes.grain * self._depth(worker, epoch, prefixes)

    def _depth(self, worker: WorkerId, epoch: Epoch, prefixes: PromptPrefixes) -> int:
        known = self._known(worker, epoch)
        return max((number for number, name in enumerate(prefixes.names, 1) if name in known), default=0)

    def _known(self, worker: WorkerId, epoch: Epoch) -> set[bytes]:
        if self._clock() >= self._expires_s.get((worker, epoch), 0.0):
            self.forget(worker, epoch)
        return self._names.get((worker, epoch), set())
