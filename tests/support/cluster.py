"""A whole cluster of real processes for tests, started and stopped through the command line as a user would."""

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_alive(pid: int) -> bool:
    """Whether the process runs: gone and dead but not yet reaped both count as ended."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@dataclass
class Cluster:
    """`options` are flags of `tandem up`."""

    state_dir: Path
    options: list[str] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    rpc_port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """Base address of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    def tandem(self, *arguments: str, timeout_s: float = START_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        command = [sys.executable, "-m", "tandem", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, env=_environment()
        )

    def start(self) -> "Cluster":
        """Start and wait until ready."""
        ports = ["--port", str(self.port), "--rpc-port", str(self.rpc_port)]
        result = self.tandem("up", "--detach", "--state-dir", str(self.state_dir), *ports, *self.options)
        assert result.returncode == 0, result.stdout + result.stderr + self.logs()
        return self

    def stop(self) -> None:
        """Stop everything and check that nothing is left."""
        pids = [process["pid"] for process in self.status()["processes"]]
        result = self.tandem("down", "--state-dir", str(self.state_dir), timeout_s=STOP_TIMEOUT_S)
        assert result.returncode == 0, result.stdout + result.stderr + self.logs()
        assert not [pid for pid in pids if is_alive(pid)]

    def status(self) -> dict[str, Any]:
        """Return `tandem status --json`."""
        result = self.tandem("status", "--json", "--state-dir", str(self.state_dir))
        assert result.returncode == 0, result.stdout + result.stderr
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def process(self, name: str) -> dict[str, Any]:
        """Return the status row of one process, e.g. "decode-0"."""
        return next(row for row in self.status()["processes"] if row["name"] == name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process."""
        os.kill(self.process(name)["pid"], number)

    def logs(self) -> str:
        """Return the tail of every log, for a failing test's report."""
        tails = []
        for path in sorted((self.state_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-25:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
