"""The routers that the gateway stands beside: pinned versions, each in a virtual environment of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.script import MODEL
from tandem.cluster.ports import free_port

CACHE = Path(__file__).parents[2] / ".bench"
TOLD_OF_PIP = 500


class NotInstalled(Exception):
    """A peer cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A pass-through router from PyPI. `command` makes its arguments of a port, the upstream's port and a folder."""

    name: str
    version: str
    extras: str
    program: str
    ready_path: str
    command: Callable[[int, int, Path], Sequence[str]]

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"

    def install(self) -> Path:
        """Return its program, installed if it was not there; raises `NotInstalled`."""
        folder = CACHE / f"{self.name}-{self.version}"
        program = folder / "bin" / self.program
        if (folder / "installed").exists():
            return program
        try:
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(folder / "bin" / "pip"), "install", "-q", f"{self.name}{self.extras}=={self.version}"])
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            raise NotInstalled(f"{self.label} is not measured: {output.strip()[-TOLD_OF_PIP:]}") from error
        (folder / "installed").touch()
        return program


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _vllm_router(port: int, upstream: int, _folder: Path) -> Sequence[str]:
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port("127.0.0.1"))]
    return [
        *address,
        "--worker-urls",
        f"http://127.0.0.1:{upstream}",
        "--policy",
        "round_robin",
        "--log-level",
        "warning",
    ]


def _litellm(port: int, upstream: int, folder: Path) -> Sequence[str]:
    model = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = folder / "litellm.json"  # JSON is YAML
    without_keys = {"dangerously_permit_weak_or_unset_master_key": True}  # as the others: it listens on loopback
    models = [{"model_name": MODEL, "litellm_params": model}]
    config.write_text(json.dumps({"model_list": models, "general_settings": without_keys}))
    return ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


PEERS = (
    Peer("vllm-router", "0.1.17", "", "vllm-router", "/health", _vllm_router),
    Peer("litellm", "1.108.0", "[proxy]", "litellm", "/health/liveliness", _litellm),
)
