"""What a gateway knows of the cluster: models, their cards and their workers, read from the registry twice a second."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from common.broker.protocols import NO_CORRECTIONS, JobQueue, PrefixIndex, QueuePressure, Registry
from common.errors import BrokerUnavailable
from common.messages.ids import GatewayId, ModelName, TenantId
from common.messages.registry import ModelCard, Role, WorkerHealth, WorkerState
from common.telemetry.metrics import GatewayMetrics
from gateway.feeds import Feeds
from gateway.streams import Source

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
AWAY_MISSES = 2
FRESH_S = 3.0
"""A view older than this is no ground for saying that the cluster is ready."""


@dataclass(eq=False, slots=True)
class ModelView:
    """One model of the cluster."""

    registry: Registry
    jobs: JobQueue
    card: ModelCard | None = None
    workers: list[WorkerState] = field(default_factory=list)
    prefixes: PrefixIndex | None = None
    """None: nobody tells what workers have in their caches."""
    pressure: QueuePressure = field(default_factory=QueuePressure)
    """What waited for room at the last look."""

    @property
    def needs_card(self) -> bool:
        """Whether the card must be read (again): it is large, and changes only when its version has left."""
        if self.card is None:
            return True
        fingerprints = {state.record.fingerprint for state in self.workers if state.record.role is Role.DECODE}
        return bool(fingerprints) and self.card.fingerprint not in fingerprints


class Roster:
    """Keeps the view and the feeds up to date. While Redis is away the last view stays and readiness says so."""

    def __init__(
        self,
        gateway: GatewayId,
        feeds: Feeds,
        list_models: Callable[[], Awaitable[list[ModelName]]],
        open_model: Callable[[ModelName], ModelView],
        metrics: GatewayMetrics,
    ) -> None:
        self._gateway = gateway
        self._feeds = feeds
        self._list_models = list_models
        self._open_model = open_model
        self._metrics = metrics
        self._num_misses = 0
        self.is_trusted: Callable[[Source], bool] = lambda source: True
        """Whether nothing is held against a worker; those that are not trusted get work only if nobody is."""
        self.corrections: Callable[[ModelName], Mapping[TenantId, int]] = lambda model: NO_CORRECTIONS
        """Asked, once for each beat, by how much tenants were charged wrongly."""
        self._views: dict[ModelName, ModelView] = {}
        self._listed: frozenset[ModelName] = frozenset()
        self._refreshed_at: float | None = None

    async def watch(self) -> None:
        """Refresh until cancelled."""
        while True:
            try:
                await self.refresh()
            except BrokerUnavailable as error:
                self._num_misses += 1
                logger.warning("registry unavailable: %s", error)
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Read the registry now and renew our own lease."""
        self._listed = frozenset(await self._list_models())
        for model in self._listed:
            view = self._views.setdefault(model, self._open_model(model))
            view.workers = await view.registry.workers()
            if view.needs_card:
                view.card = await view.registry.card() or view.card
            view.pressure = await view.jobs.beat_gateway(self._gateway, self.corrections(model))
        if self._num_misses:
            self._num_misses = 0
            self._metrics.broker_reconnects.inc()
        self._refreshed_at = time.monotonic()
        self._feeds.follow(state.record for view in self._views.values() for state in view.workers)

    def view(self, model: ModelName) -> ModelView | None:
        """Return what is known of a model."""
        return self._views.get(model)

    def cards(self) -> list[ModelCard]:
        """Return the cards of the models that had a worker lately: while the only one restarts its requests are told to
        come back, not that there is no such model."""
        return [view.card for model, view in self._views.items() if view.card is not None and model in self._listed]

    def decode_workers(self, model: ModelName) -> list[WorkerState]:
        """Return the decode workers that should get a job now, the least loaded first: of those that are open the
        trusted ones, and all while none of them is, for a doubted worker is better than none."""
        usable = self.open_workers(model)
        return [state for state in usable if self.is_trusted(source_of(state))] or usable

    def serving_workers(self, model: ModelName) -> list[WorkerState]:
        """Return the decode workers that serve, in any order: also one that takes nobody in just now because a suspect
        request runs alone on it."""
        view = self._views.get(model)
        return [state for state in view.workers if self._is_serving(state)] if view is not None else []

    def open_workers(self, model: ModelName) -> list[WorkerState]:
        """Return the decode workers that can take a job now, trusted or not, the least loaded first."""
        usable = [state for state in self.serving_workers(model) if state.load.is_open]
        return sorted(usable, key=lambda state: state.load.num_running + state.load.num_waiting)

    @property
    def is_fresh(self) -> bool:
        """Whether the registry has answered lately."""
        return self._refreshed_at is not None and time.monotonic() - self._refreshed_at < FRESH_S

    @property
    def is_away(self) -> bool:
        """Whether the registry is known not to answer; one miss may be a broken connection, which is made anew."""
        return self._num_misses >= AWAY_MISSES

    @property
    def models(self) -> list[ModelName]:
        """Return the names seen so far."""
        return list(self._views)

    def _is_serving(self, state: WorkerState) -> bool:
        is_at_work = state.record.role is Role.DECODE and state.load.health is WorkerHealth.READY
        return is_at_work and self._feeds.is_connected(source_of(state))


def source_of(state: WorkerState) -> Source:
    """Return the incarnation that the registry lists."""
    return Source(state.record.worker, state.record.epoch)
