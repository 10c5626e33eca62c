"""`python -m bench.gateway`: the gateway's own speed, and other routers' in the same run.

One core is the router's: the gateway, or a peer. The other one has the scripted worker and the scripted upstream, the
client, and Redis. Routers take turns (A-B-A-B), workload by workload.
"""

import argparse
import asyncio
import gc
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop

from bench.environments import NotInstalled
from bench.gateway.client import BrokenAnswer
from bench.gateway.pacing import Pacer
from bench.gateway.peers import PEERS, Peer
from bench.gateway.processes import LOOK_S, Cores, Measured, NotStarted, pin, running, until_answered
from bench.gateway.report import DIRECT, GATEWAY, print_tables, tell_progress, write_json
from bench.gateway.script import Script, make_script
from bench.gateway.source import Source
from bench.gateway.upstream import Upstream
from bench.gateway.workloads import QUICK, Bench, Sizes, Target
from common.broker.redis_broker import RedisBroker
from common.errors import BrokerUnavailable
from deploy.compiled import install
from tandem.cluster.ports import free_port
from tandem.cluster.redis_binary import require_redis

DEFAULT_JSON = Path(".bench") / "gateway.json"
COMPILED = Path(".bench") / "compiled"


def main() -> int:
    """Measure, print and write; returns the exit code."""
    arguments = _parse()
    return uvloop.run(_run(arguments))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny: shows that everything runs, no figure counts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every router (default %(default)s)")
    parser.add_argument(
        "--only", action="append", help="this workload alone: fast, paced, lone, short or breaks; repeatable"
    )
    parser.add_argument("--no-peers", action="store_true", help="the gateway alone")
    parser.add_argument(
        "--interpreted", action="store_true", help="the gateway as a checkout runs it, not compiled as in its image"
    )
    parser.add_argument("--json", type=Path, default=DEFAULT_JSON, help="where to write (default %(default)s)")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace) -> int:
    sizes = QUICK if arguments.quick else Sizes()
    package = None if arguments.interpreted else install(COMPILED.resolve())
    cores = Cores.of_machine()
    notes = [] if cores.measured is not None else ["There is one core only: router and load share it."]
    pin(cores.rest)
    script, pacer = make_script(), Pacer()
    bench, failures = Bench(script, pacer, sizes), list[str]()
    peers = [] if arguments.no_peers or arguments.quick else _install(notes)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        upstream = Upstream(script, pacer)
        await upstream.start()
        targets = [Target(DIRECT, upstream.port)]
        targets.append(await stack.enter_async_context(_gateway(script, pacer, cores, folder, package)))
        for peer, program in peers:
            try:
                one = await stack.enter_async_context(_peer(peer, program, upstream, cores, folder))
            except NotStarted as error:
                notes.append(f"{peer.label} is not measured: {error}")
            else:
                targets.append(one)
        gc.freeze()
        gc.disable()  # a collection of ours would be somebody's late event
        for name in arguments.only or bench.workloads:
            for _ in range(1 if arguments.quick or name == "breaks" else arguments.rounds):
                for target in targets:
                    await _measure(bench, name, target, failures)
    print_tables(targets, notes + failures)
    write_json(arguments.json, targets, sizes, notes + failures)
    return 1 if failures else 0


async def _measure(bench: Bench, name: str, target: Target, failures: list[str]) -> None:
    """Run one workload; one that breaks has no figures, and the others go on."""
    try:
        await bench.run(name, target)
    except BrokenAnswer as error:
        failures.append(f"{target.label}: {name}: {error}")
    else:
        tell_progress(name, target)


def _install(notes: list[str]) -> Sequence[tuple[Peer, Path]]:
    installed = []
    for peer in PEERS:
        try:
            installed.append((peer, peer.install()))
        except NotInstalled as error:
            notes.append(str(error))
    return installed


@asynccontextmanager
async def _gateway(
    script: Script, pacer: Pacer, cores: Cores, folder: Path, package: Path | None
) -> AsyncIterator[Target]:
    """Run a gateway with its Redis and its one scripted worker while entered; `package` is where it is, None: here."""
    secret, port, redis_port = secrets.token_hex(), free_port("127.0.0.1"), free_port("127.0.0.1")
    redis: list[str | Path] = [
        require_redis().path,
        "--port",
        str(redis_port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        folder,
    ]
    url, log = f"redis://127.0.0.1:{redis_port}/0", folder / "gateway.log"
    command = [sys.executable, "-P", "-m", "gateway", "--redis-url", url, "--port", str(port), "--rpc-port", "0"]
    environment = {"TANDEM_SECRET": secret, **({} if package is None else {"PYTHONPATH": str(package)})}
    async with (
        running(redis, cores.rest, folder / "redis.log"),
        RedisBroker.connect(url, script.card.model) as broker,
    ):
        await _until_there(broker)
        source = Source(broker, secret, script, pacer)
        await source.start()
        try:
            async with running(command, cores.measured, log, environment) as pid:
                until_ready = partial(until_answered, port, "/health/ready", pid, log)
                await until_ready()
                yield Target(GATEWAY, port, Measured(pid), source.stop, until_ready)
        finally:
            await source.stop()


async def _until_there(broker: RedisBroker) -> None:
    """Return as soon as Redis answers."""
    while True:
        try:
            await broker.index.models()
            return
        except BrokerUnavailable:
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def _peer(peer: Peer, program: Path, upstream: Upstream, cores: Cores, folder: Path) -> AsyncIterator[Target]:
    port, log = free_port("127.0.0.1"), folder / f"{peer.name}.log"
    async with running([program, *peer.command(port, upstream.port, folder)], cores.measured, log) as pid:
        await until_answered(port, peer.ready_path, pid, log)
        yield Target(peer.label, port, Measured(pid), upstream.die)


if __name__ == "__main__":
    sys.exit(main())
