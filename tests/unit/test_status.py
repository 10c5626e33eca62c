"""What `tandem status` and the readiness of a start make of what the supervisor wrote and of the registry."""

import os

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.broker.overview import Overview
from common.messages.ids import Epoch, Fingerprint, ModelName, WorkerId
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerRecord, WorkerState
from common.telemetry.metrics import GatewayMetrics
from tandem.cluster.gateway_view import handover_in
from tandem.cluster.identity import ProcessRef, ref_of
from tandem.cluster.readiness import loading_of
from tandem.cluster.report import GatewayView, HandoverReport, report_of
from tandem.cluster.state import ClusterState, ProcessEntry
from tandem.commands.status import show


def _state(supervisor: ProcessRef | None, *processes: ProcessEntry) -> ClusterState:
    assert supervisor is not None
    return ClusterState(supervisor, "m", "redis://x", "127.0.0.1", 8000, "run", True, processes, 8001)


def _worker(name: str, pid: int, health: WorkerHealth) -> WorkerState:
    record = WorkerRecord(
        WorkerId(name), Role.DECODE, Epoch(5), ModelName("m"), Fingerprint("f"), "127.0.0.1:9", pid, 10, 16, 100, 4
    )
    load = WorkerLoad(
        *(health, 10, 8, 3, 1, 2, 1, 99),
        loading_fraction=0.5,
        num_bindings=11,
        num_quarantined=12,
        num_placements=13,
        num_failovers=14,
        num_tries=15,
        num_stale=16,
        num_cancelled_chunks=17,
        num_violations=18,
    )
    return WorkerState(record, load, 0.1)


def test_status_joins_supervisor_and_registry() -> None:
    me = ref_of(os.getpid())
    assert me is not None
    state = _state(
        me,
        ProcessEntry("redis", "redis", me),
        ProcessEntry("prefill-0", "prefill", None),
        ProcessEntry("decode-0", "decode", me),
        ProcessEntry("gateway-0", "gateway", me),
    )
    overview = Overview(
        (_worker("decode-0", me.pid, WorkerHealth.READY), _worker("far-1", 1, WorkerHealth.LOADING)), 2, 1
    )
    report = report_of(state, overview, {})
    rows = {process.name: process for process in report.processes}
    assert [rows[name].health for name in ("supervisor", "redis", "prefill-0", "decode-0", "gateway-0", "far-1")] == [
        "ready",
        "ready",
        "dead",
        "ready",
        "not ready",
        "loading",
    ]
    decode = rows["decode-0"]
    assert decode.kv is not None
    assert (decode.kv.blocks_free, decode.running, decode.waiting, decode.reserved, decode.steps) == (8, 1, 2, 1, 99)
    assert (report.queues.waiting_jobs, report.queues.prefill_tasks) == (2, 1)


def test_status_tells_restarts_and_where_metrics_and_rpc_are() -> None:
    me = ref_of(os.getpid())
    assert me is not None
    ours = _worker("decode-0", me.pid, WorkerHealth.READY)
    ours = msgspec.structs.replace(ours, record=msgspec.structs.replace(ours.record, metrics_address="127.0.0.1:77"))
    state = _state(me, ProcessEntry("decode-0", "decode", me, 3), ProcessEntry("gateway-0", "gateway", me))
    report = report_of(
        state,
        Overview((ours, _worker("far-1", 1, WorkerHealth.READY)), 0, 0),
        {"gateway-0": GatewayView(is_ready=True)},
    )
    assert [(row.name, row.restarts, row.metrics, row.rpc) for row in report.processes] == [
        ("supervisor", None, None, None),
        ("decode-0", 3, "127.0.0.1:77", None),
        ("gateway-0", 0, "127.0.0.1:8000", "127.0.0.1:8001"),
        ("far-1", None, None, None),
    ]


def test_status_tells_why_a_process_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    me = ref_of(os.getpid())
    assert me is not None
    trouble = "could not be started: Too many open files"
    state = _state(
        me,
        ProcessEntry("decode-0", "decode", None, 4, trouble),
        ProcessEntry("gateway-0", "gateway", None, 2, trouble),
        ProcessEntry("gateway-1", "gateway", me),
    )
    report = report_of(state, Overview((), 0, 0), {"gateway-1": GatewayView(is_ready=True)})
    assert [(row.name, row.health, row.restarts, row.trouble) for row in report.processes] == [
        ("supervisor", "ready", None, None),
        ("decode-0", "dead", 4, trouble),
        ("gateway-0", "dead", 2, trouble),
        ("gateway-1", "ready", 0, None),
    ]
    show(report)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if ": could" in line] == [f"decode-0: {trouble}", f"gateway-0: {trouble}"]


def test_status_tells_what_hand_overs_have_come_to() -> None:
    me = ref_of(os.getpid())
    assert me is not None
    state = _state(me, ProcessEntry("decode-0", "decode", me), ProcessEntry("gateway-0", "gateway", me))
    gateway = HandoverReport(placements=5, failovers=2, stale=1)
    overview = Overview((_worker("decode-0", me.pid, WorkerHealth.STALLED),), 0, 0)
    report = report_of(state, overview, {"gateway-0": GatewayView(is_ready=True, handover=gateway)})
    rows = {process.name: process for process in report.processes}
    assert rows["decode-0"].health == "stalled"
    assert rows["decode-0"].handover == HandoverReport(
        bindings=11,
        quarantined=12,
        placements=13,
        failovers=14,
        tries=15,
        stale=16,
        cancelled_chunks=17,
        violations=18,
    )
    assert rows["gateway-0"].handover == gateway
    assert rows["supervisor"].handover is None


def test_a_gateways_counts_are_read_from_its_metrics() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    for kind in ("first", "first", "again"):
        metrics.note_placement(kind)
    for reason in ("lost", "stalled"):
        metrics.note_failover(reason)
    metrics.stale_messages.inc(7)
    text = generate_latest(metrics.registry).decode()
    assert handover_in(text) == HandoverReport(placements=3, failovers=2, stale=7)
    assert handover_in("") == HandoverReport(0, 0, 0)


def test_the_table_shows_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    me = ref_of(os.getpid())
    state = _state(me, ProcessEntry("decode-0", "decode", me), ProcessEntry("gateway-0", "gateway", me))
    overview = Overview((_worker("decode-0", os.getpid(), WorkerHealth.STALLED),), 2, 1)
    gateway = GatewayView(is_ready=True, handover=HandoverReport(placements=51, failovers=52, stale=53))
    show(report_of(state, overview, {"gateway-0": gateway}))
    processes, handovers, queues = capsys.readouterr().out.strip().split("\n\n")
    assert "stalled" in processes
    header, decode, gateway_row = (line.split() for line in handovers.split("\n"))
    columns = "hand-over bindings quarantined placements failovers tries stale chunks spared violations"
    assert header == columns.split()
    assert decode == ["decode-0", *map(str, (11, 12, 13, 14, 15, 16, 17, 18))]
    assert gateway_row == ["gateway-0", "51", "52", "53"]
    assert queues == "queues: 2 waiting jobs, 1 prefill tasks"


def test_a_restarted_worker_is_shown_once() -> None:
    me = ref_of(os.getpid())
    overview = Overview((_worker("decode-0", 1, WorkerHealth.READY),), 0, 0)
    report = report_of(
        _state(me, ProcessEntry("decode-0", "decode", me)), overview, {"gateway-0": GatewayView(is_ready=True)}
    )
    assert [(row.name, row.health) for row in report.processes[1:]] == [("decode-0", "unregistered")]


def test_status_without_redis_still_tells_who_runs() -> None:
    me = ref_of(os.getpid())
    report = report_of(
        _state(me, ProcessEntry("decode-0", "decode", me)), None, {"gateway-0": GatewayView(is_ready=True)}
    )
    assert [process.health for process in report.processes] == ["ready", "unregistered"]
    assert report.queues.waiting_jobs is None


def test_what_an_earlier_process_left_in_the_registry_is_not_ready() -> None:
    workers = [_worker("decode-0", 41, WorkerHealth.READY)]
    assert loading_of(workers, {"decode-0": 42}).num_ready == 0
    assert loading_of(workers, {"decode-0": 41}).fractions == {"decode-0": 1.0}
    assert loading_of([_worker("decode-0", 41, WorkerHealth.LOADING)], {"decode-0": 41}).fractions == {"decode-0": 0.5}
