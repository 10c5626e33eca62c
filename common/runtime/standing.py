"""How a worker stands, as the registry, its gauges and its health probes are told: health, load and tallies.

Owned by the worker's event loop.
"""

from dataclasses import dataclass

from common.messages.ids import EntryId
from common.messages.registry import WorkerHealth, WorkerLoad
from common.runtime.engine import EngineLoad


@dataclass(frozen=True, slots=True)
class Tallies:
    """What the edge of a worker has counted (fields as in `WorkerLoad`).

    All but `num_bindings` count since the process began. `num_placements` includes the failovers.
    """

    num_bindings: int = 0
    num_placements: int = 0
    num_failovers: int = 0
    num_tries: int = 0
    num_stale: int = 0


@dataclass(slots=True)
class Standing:
    """`phase` is where the worker is in its life, `load` what the engine reported last."""

    load: EngineLoad
    phase: WorkerHealth = WorkerHealth.LOADING
    is_stalled: bool = False
    loading_fraction: float = 0.0

    @property
    def health(self) -> WorkerHealth:
        """What others are told; a stall outranks everything, because work must move away from it."""
        return WorkerHealth.STALLED if self.is_stalled else self.phase

    def worker_load(self, tallies: Tallies) -> WorkerLoad:
        """Return what the heartbeat carries."""
        load = self.load
        return WorkerLoad(
            health=self.health,
            blocks_total=load.blocks_total,
            blocks_free=load.blocks_free,
            blocks_cached=load.blocks_cached,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            num_reserved=load.num_reserved,
            num_steps=load.num_steps,
            absorbed=None if load.absorbed is None else EntryId(load.absorbed),
            loading_fraction=self.loading_fraction if self.phase is WorkerHealth.LOADING else 1.0,
            num_bindings=tallies.num_bindings,
            num_quarantined=load.num_quarantined,
            is_exclusive=load.is_exclusive,
            num_placements=tallies.num_placements,
            num_failovers=tallies.num_failovers,
            num_tries=tallies.num_tries,
            num_stale=tallies.num_stale,
            num_cancelled_chunks=load.num_cancelled_chunks,
            num_violations=load.num_violations,
            num_uncomputed=load.num_uncomputed,
            step_cost=load.step_cost,
        )
