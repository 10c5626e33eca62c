"""What a worker knows about the other workers: the registry's rows, refreshed in the background.

Addresses of peers come from here only, never from a task or a message.
"""

import asyncio
import logging
from collections.abc import Iterable

from common.broker.protocols import Registry
from common.errors import BrokerUnavailable
from common.messages.ids import Epoch, Fingerprint, WorkerId
from common.messages.registry import Role, WorkerRecord, WorkerState

logger = logging.getLogger(__name__)

REFRESH_S = 0.5


class Peers:
    """Live workers of the model that have our fingerprint. While Redis is away the last view stays."""

    def __init__(self, registry: Registry, fingerprint: Fingerprint) -> None:
        self._registry = registry
        self._fingerprint = fingerprint
        self._states: dict[WorkerId, WorkerState] = {}
        self._refused: set[Epoch] = set()

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
        states = await self._registry.workers()
        self._states = {state.record.worker: state for state in states if self._is_compatible(state.record)}
        self._refuse([state.record for state in states if not self._is_compatible(state.record)])

    def find(self, worker: WorkerId, epoch: Epoch) -> WorkerRecord | None:
        """Return that incarnation, or None if it is not registered."""
        state = self._states.get(worker)
        return state.record if state is not None and state.record.epoch == epoch else None

    def ready(self, role: Role) -> list[WorkerRecord]:
        """Return the workers of a role that take new work."""
        return [state.record for state in self._states.values() if state.record.role is role and state.load.is_open]

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
