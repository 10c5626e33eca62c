"""How processes live and end: epochs, signals, pauses, cores, exit codes, and children that die with their parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import InvalidSetting, ModelUnusable
from common.lifecycle.cgroup import cpu_quota, memory_left_bytes
from common.lifecycle.cores import available_cores, num_usable_cores, pin_to
from common.lifecycle.cpu_flags import computes_bfloat16, cpu_flags
from common.lifecycle.epochs import new_epoch
from common.lifecycle.exit_codes import EXIT_CONFIG, run_process
from common.lifecycle.memory import available_memory_bytes
from common.lifecycle.orphan import command_under
from common.lifecycle.signals import StopSignals
from common.lifecycle.tick_gap import TickGap


def test_epochs_are_distinct_positive_and_63_bits() -> None:
    epochs = {new_epoch() for _ in range(1000)}
    assert len(epochs) == 1000
    assert all(0 < epoch < 1 << 63 for epoch in epochs)


async def test_first_signal_stops_second_hurries() -> None:
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.stop.wait()
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await signals.hurry.wait()


async def test_handlers_are_gone_afterwards() -> None:
    with StopSignals():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_tick_gap_reports_a_pause_once() -> None:
    gap = TickGap(interval_s=1.0, tolerance_s=0.5)
    assert [gap.observe(now) for now in (10.0, 11.0, 12.4)] == [0.0, 0.0, 0.0]
    assert gap.observe(20.0) == pytest.approx(6.6)
    assert gap.observe(21.0) == 0.0


@pytest.mark.parametrize(("cores", "quota", "usable"), [(8, None, 8), (8, 2.5, 2), (2, 0.5, 1), (2, 16.0, 2)])
def test_quota_bounds_usable_cores(cores: int, quota: float | None, usable: int) -> None:
    assert num_usable_cores(cores, quota) == usable


def _write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def test_cgroup_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "self": "0::/pod/box\n",
            "fs/pod/cpu.max": "150000 100000\n",
            "fs/pod/box/cpu.max": "max 100000\n",
            "fs/pod/memory.max": "1000\n",
            "fs/pod/memory.current": "700\n",
            "fs/pod/memory.stat": "anon 500\ninactive_file 50\n",
            "fs/pod/box/memory.max": "max\n",
            "fs/pod/box/memory.current": "600\n",
        },
    )
    assert cpu_quota(tmp_path / "fs", tmp_path / "self") == 1.5
    assert memory_left_bytes(tmp_path / "fs", tmp_path / "self") == 350


def test_cgroup_1_and_containers_that_mount_their_own_group_at_the_root(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "self": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "fs/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "fs/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "fs/memory/memory.limit_in_bytes": "1000\n",
            "fs/memory/memory.usage_in_bytes": "1200\n",
        },
    )
    assert cpu_quota(tmp_path / "fs", tmp_path / "self") == 2.0
    assert memory_left_bytes(tmp_path / "fs", tmp_path / "self") == 0


def test_no_limit_is_none(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "self": "4:memory:/\n3:cpu:/\n",
            "fs/cpu/cpu.cfs_quota_us": "-1\n",
            "fs/cpu/cpu.cfs_period_us": "100000\n",
            "fs/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "fs/memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert cpu_quota(tmp_path / "fs", tmp_path / "self") is None
    assert memory_left_bytes(tmp_path / "fs", tmp_path / "self") is None
    assert cpu_quota(tmp_path, tmp_path / "missing") is None


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20


def test_pinning_to_a_core_that_is_not_ours_is_refused() -> None:
    before = available_cores()
    pin_to(())
    with pytest.raises(InvalidSetting, match="cpus"):
        pin_to((100_000,))
    assert available_cores() == before


def test_cpu_flags_decide_about_bfloat16(tmp_path: Path) -> None:
    _write(tmp_path, {"cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n"})
    assert computes_bfloat16(cpu_flags(tmp_path / "cpuinfo"))
    assert not computes_bfloat16(frozenset({"avx2"}))
    assert cpu_flags(tmp_path / "missing") == frozenset()


def _refuse() -> int:
    raise ModelUnusable("model x\nis missing")


def _interrupt() -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("main", "code", "stderr"),
    [(lambda: None, 0, ""), (lambda: 3, 3, ""), (_refuse, EXIT_CONFIG, "model x is missing\n"), (_interrupt, 130, "")],
)
def test_exit_codes(main: Callable[[], int | None], code: int, stderr: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        run_process(main)
    assert ending.value.code == code
    assert capsys.readouterr().err == stderr


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_process(lambda: 1 // 0)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.timeout(30)
def test_a_child_dies_when_its_parent_is_killed() -> None:
    grandchild = "import sys, time; sys.stdout.write('here\\n'); sys.stdout.flush(); time.sleep(60)"
    parent = (
        "import os, subprocess, sys\n"
        "from common.lifecycle.orphan import command_under\n"
        f"child = subprocess.Popen(command_under(os.getpid(), (sys.executable, '-c', {grandchild!r})))\n"
        "child.wait()\n"
    )
    with subprocess.Popen((sys.executable, "-c", parent), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        # The pipe ends when its last writer, the grandchild, is gone: at once, not after its minute.
        assert process.stdout.read() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    command = command_under(1 << 22, (sys.executable, "-c", "import sys; sys.stdout.write('started')"))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode != 0
    assert ended.stdout == ""
