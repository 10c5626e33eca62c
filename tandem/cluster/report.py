"""What `tandem status` knows: the supervisor's processes joined with what the workers say about themselves."""

from collections.abc import Mapping, Sequence

import msgspec

from common.broker.overview import Overview
from common.messages.registry import WorkerState
from tandem.cluster.child import WORKER_ROLES, ChildRole
from tandem.cluster.identity import is_running
from tandem.cluster.state import ClusterState, ProcessEntry

READY = "ready"
NOT_READY = "not ready"
STARTING = "starting"
DEAD = "dead"
UNREGISTERED = "unregistered"
"""Runs, but the registry does not know it: still starting, frozen, or without its Redis."""


class KVBlocks(msgspec.Struct, frozen=True):
    """Blocks of a worker's cache."""

    blocks_total: int
    blocks_free: int
    blocks_cached: int


class HandoverReport(msgspec.Struct, frozen=True):
    """What a process has to do with hand-overs and lost work; None: processes of its role do not count that.

    `bindings` under way and `quarantined` blocks are of now, the others count since the process began (see
    `WorkerLoad`): `placements` include the `failovers`, which continue a lost one; `stale` messages were ignored.
    """

    placements: int
    failovers: int
    stale: int
    tries: int | None = None
    bindings: int | None = None
    quarantined: int | None = None
    cancelled_chunks: int | None = None
    violations: int | None = None


class GatewayView(msgspec.Struct, frozen=True):
    """What a gateway says about itself; `handover` is None if it does not answer."""

    is_ready: bool
    handover: HandoverReport | None = None


NO_ANSWER = GatewayView(is_ready=False)


class ProcessReport(msgspec.Struct, frozen=True):
    """One process; what only workers have is None for the others.

    `restarts` is None unless our supervisor keeps the process; `trouble` is why it could not start it. `metrics` is
    where it serves /metrics (host:port), `rpc` where gRPC for clients.
    """

    name: str
    role: str
    pid: int | None
    epoch: int | None
    address: str
    health: str
    kv: KVBlocks | None = None
    running: int | None = None
    waiting: int | None = None
    reserved: int | None = None
    steps: int | None = None
    restarts: int | None = None
    metrics: str | None = None
    rpc: str | None = None
    handover: HandoverReport | None = None
    trouble: str | None = None


class QueueReport(msgspec.Struct, frozen=True):
    """Lengths of the queues over all models; None: Redis did not answer."""

    waiting_jobs: int | None
    prefill_tasks: int | None


class StatusReport(msgspec.Struct, frozen=True):
    """Everything that `tandem status` shows."""

    processes: tuple[ProcessReport, ...]
    queues: QueueReport


def report_of(
    state: ClusterState | None, overview: Overview | None, gateways: Mapping[str, GatewayView]
) -> StatusReport:
    """Join what the supervisor wrote, what Redis holds and what the gateways (by name) say; any may be missing."""
    workers = overview.workers if overview else ()
    processes: list[ProcessReport] = []
    if state is not None:
        processes.append(_supervisor(state))
        processes += [
            _supervised(state, entry, workers, gateways.get(entry.name, NO_ANSWER), overview is not None)
            for entry in state.processes
        ]
    # A seat of ours is shown once: the registry lists the dead process of a restarted worker for some seconds more.
    seats = {process.name for process in processes}
    processes += [_worker(row) for row in workers if row.record.worker not in seats]
    queues = QueueReport(overview.num_waiting_jobs, overview.num_prefill_tasks) if overview else QueueReport(None, None)
    return StatusReport(tuple(processes), queues)


def _supervisor(state: ClusterState) -> ProcessReport:
    health = READY if state.is_ready else STARTING
    return ProcessReport("supervisor", "supervisor", state.supervisor.pid, None, "", health)


def _supervised(
    state: ClusterState,
    entry: ProcessEntry,
    workers: Sequence[WorkerState],
    gateway: GatewayView,
    is_redis_there: bool,
) -> ProcessReport:
    pid = entry.ref.pid if entry.ref is not None and is_running(entry.ref) else None
    if entry.role in WORKER_ROLES:
        row = next((row for row in workers if row.record.pid == pid and row.record.worker == entry.name), None)
        if row is not None:
            return _worker(row, entry.restarts)
        health = DEAD if pid is None else UNREGISTERED
        return ProcessReport(
            entry.name, entry.role, pid, None, "", health, restarts=entry.restarts, trouble=_trouble(entry, pid)
        )
    is_gateway = entry.role == ChildRole.GATEWAY
    is_ready = gateway.is_ready if is_gateway else is_redis_there
    address = f"{state.host}:{state.port}" if is_gateway else ""
    health = DEAD if pid is None else READY if is_ready else NOT_READY
    return ProcessReport(
        entry.name,
        entry.role,
        pid,
        None,
        address,
        health,
        restarts=entry.restarts,
        metrics=address if is_gateway else None,
        rpc=f"{state.host}:{state.rpc_port}" if is_gateway else None,
        handover=gateway.handover,
        trouble=_trouble(entry, pid),
    )


def _trouble(entry: ProcessEntry, pid: int | None) -> str | None:
    return entry.trouble or None if pid is None else None


def _worker(row: WorkerState, restarts: int | None = None) -> ProcessReport:
    record, load = row.record, row.load
    return ProcessReport(
        name=record.worker,
        role=record.role,
        pid=record.pid,
        epoch=record.epoch,
        address=record.address,
        health=load.health,
        kv=KVBlocks(load.blocks_total, load.blocks_free, load.blocks_cached),
        running=load.num_running,
        waiting=load.num_waiting,
        reserved=load.num_reserved,
        steps=load.num_steps,
        restarts=restarts,
        metrics=record.metrics_address or None,
        handover=HandoverReport(
            placements=load.num_placements,
            failovers=load.num_failovers,
            stale=load.num_stale,
            tries=load.num_tries,
            bindings=load.num_bindings,
            quarantined=load.num_quarantined,
            cancelled_chunks=load.num_cancelled_chunks,
            violations=load.num_violations,
        ),
    )
