"""The routers that the gateway stands beside: pinned versions, each in a virtual environment of its own."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.environments import environment
from bench.gateway.script import MODEL
from tandem.cluster.ports import free_port


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
        folder = environment(self.label, f"{self.name}-{self.version}", [f"{self.name}{self.extras}=={self.version}"])
        return folder / "bin" / self.program


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
