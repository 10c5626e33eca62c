"""Whoever computes lets event loops, gateways and Redis go first, and is still ready and answering beside others."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.runtime.edge import CPU_NICENESS
from tests.support.cluster import Cluster
from tests.support.tiny_models import write_tiny_llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.redis,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to whole processes"),
]

NICENESS_FIELD = 18
"""In a thread's `stat`, counted from 0."""

BORROWED = "TANDEM_BORROWED_CPUS"
NUM_THREADS = 2
LONG_PROMPT = "tell me more " * 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Beside one busy process per worker."""
    folder = tmp_path_factory.mktemp("precedence")
    model = write_tiny_llama(folder / "model", hidden=256, num_layers=4, intermediate=512, max_position=8192)
    options = ["--model", str(model), "--served-name", "random", "--dtype", "float32", "--threads", str(NUM_THREADS)]
    options += ["--disaggregation", "always"]
    running = Cluster(folder / "state", options).start()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield running
        running.stop()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _complete(cluster: Cluster, prompt: str) -> int:
    """Return how many tokens the answer has."""
    body = {"model": "random", "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{cluster.url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


def _niceness(thread: Path) -> int:
    after_name = (thread / "stat").read_text().rpartition(")")[2].split()
    return int(after_name[NICENESS_FIELD - 2])


def _threads(cluster: Cluster, name: str) -> dict[int, int]:
    """Return the niceness of a process's threads, by their ids; the first one's id is the process's."""
    tasks = Path(f"/proc/{cluster.process(name)['pid']}/task")
    return {int(thread.name): _niceness(thread) for thread in tasks.iterdir()}


def _num_borrowed(pid: int) -> int:
    """Return on how many cores of others a worker computes while they are idle; it has a thread on each."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (cores,) = (value for name, _, value in (text.partition("=") for text in variables) if name == BORROWED)
    return len([core for core in cores.split(",") if core])


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_all_that_computes_is_nicer_and_nothing_else(cluster: Cluster, name: str) -> None:
    assert _complete(cluster, LONG_PROMPT) == 16
    pid = cluster.process(name)["pid"]
    threads = _threads(cluster, name)
    others = set(_threads(cluster, "gateway-0").values()) | set(_threads(cluster, "redis").values())
    assert others == {threads[pid]}, "the event loop of a worker is like gateways and Redis"
    nicer = [niceness for niceness in threads.values() if niceness != threads[pid]]
    assert nicer == [threads[pid] + CPU_NICENESS] * (NUM_THREADS + _num_borrowed(pid))
