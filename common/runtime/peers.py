"""What a worker knows about the other workers: the registry's rows, refreshed in the background.

Addresses of peers come from here only, never from a task or a message. While Redis is away the last view stays, and for
one lease after that, or after a pause of our own, nobody is missed: the heartbeats of the others may be late as well.
"""

import asyncio
import logging
import math
from collections.abc import Iterable

from common.broker.protocols import Registry
from common.errors import BrokerUnavailable
from common.lifecycle.awake_clock import AwakeClock
from common.messages.ids import Epoch, Fingerprint, WorkerId
from common.messages.registry import Role, WorkerRecord, WorkerState

logger = logging.getLogger(__name__)

REFRESH_S = 0.5


class Peers:
    """Live workers of the model that have our fingerprint; after an outage the lost ones stay for `doubt_s`."""

    def __init__(self, registry: Registry, fingerprint: Fingerprint, clock: AwakeClock, doubt_s: float) -> None:
        self._registry = registry
        self._fingerprint = fingerprint
        self._clock = clock
        self._doubt_s = doubt_s
        self._doubted_until_s = -math.inf
        self._shunned_until_s: dict[Epoch, float] = {}
        self._states: dict[WorkerId, WorkerState] = {}
        self._refused: set[Epoch] = set()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a worker that is missing in the registry may live all the same."""
        return self._clock.is_standing or self._clock.now() < self._doubted_until_s

    async def watch(self) -> None:
        """Refresh until cancelled."""
        while True:
            try:
                await self.refresh()
            except BrokerUnavailable:
                logger.warning("registry unavailable: keeping the last view of the peers")
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Read the registry now."""
        try:
            states = await self._registry.workers()
        except BrokerUnavailable:
            self._doubted_until_s = self._clock.now() + self._doubt_s
            raise
        known = {state.record.worker: state for state in states if self._is_compatible(state.record)}
        self._states = self._states | known if self.is_in_doubt else known
        self._refuse([state.record for state in states if not self._is_compatible(state.record)])

    def find(self, worker: WorkerId, epoch: Epoch) -> WorkerRecord | None:
        """Return that incarnation, or None if it is not registered."""
        state = self._states.get(worker)
        return state.record if state is not None and state.record.epoch == epoch else None

    def ready(self, role: Role) -> list[WorkerRecord]:
        """Return the workers of a role that take new work."""
        return [state.record for state in self.open(role)]

    def open(self, role: Role) -> list[WorkerState]:
        """Return the rows of the workers of a role that take new work: who they are, and how loaded."""
        now_s = self._clock.now()
        return [
            state
            for state in self._states.values()
            if state.record.role is role
            and state.load.is_open
            and self._shunned_until_s.get(state.record.epoch, -math.inf) <= now_s
        ]

    def shun(self, epoch: Epoch) -> None:
        """Count on a worker that did not answer us for `doubt_s` no more, unless it speaks before: the registry may see
        it well when our way to it is broken."""
        now_s = self._clock.now()
        self._shunned_until_s = {other: until for other, until in self._shunned_until_s.items() if until > now_s}
        self._shunned_until_s[epoch] = now_s + self._doubt_s

    def hear(self, epoch: Epoch) -> None:
        """A worker has called us."""
        self._shunned_until_s.pop(epoch, None)

    def _is_compatible(self, record: WorkerRecord) -> bool:
        return record.fingerprint == self._fingerprint

    def _refuse(self, records: Iterable[WorkerRecord]) -> None:
        """Say once for each incarnation why it gets and gives no work here."""
        refused = {record.epoch: record for record in records}
        for epoch in refused.keys() - self._refused:
            logger.warning(
                "not pairing with %s: fingerprint %s is not our %s (model files, KV geometry or protocol differ)",
                refused[epoch].worker,
                refused[epoch].fingerprint,
                self._fingerprint,
            )
        self._refused = set(refused)
