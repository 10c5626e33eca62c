"""`python -m bench.disagg`: `--disaggregation auto` beside `always` and `never` under the mixed load of `bench.peers`.

Three clusters run at the same time and wait; each round of arrivals goes to one after the other (A-B-A-B). `never` has
no prefill worker, so that its decode worker has all cores: what an aggregated engine would do with the machine. With
--add a long run can be made in pieces: their figures are put together as long as commit and machine are the same.
"""

import argparse
import asyncio
import gc
import secrets
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from bench.disagg.report import FLAGS, WORKLOADS, load, print_table, tell_progress, write_document, write_json
from bench.gateway.processes import NotStarted
from bench.machine import CACHE
from bench.peers.engines import Engine, Options, tandem
from bench.peers.figures import Incomplete, figures
from bench.peers.plan import QUICK, Sizes, plan
from bench.peers.report import Record
from bench.peers.weights import write_weights

WARM_UP = ("streams-8", "prefill")
"""Until every cluster has answered these it has measured nothing to decide by."""

COMMON_FLAGS = ("--kv-memory", "1GiB", "--canary-interval-s", "60")


def main() -> int:
    """Measure, print and write; returns the exit code: 1 if something is missing."""
    return uvloop.run(_run(_parse()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny: shows that everything runs, no figure counts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of everybody (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="arrivals of one turn (default %(default)s)")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="this rate alone; repeatable")
    parser.add_argument("--modes", default=",".join(FLAGS), help="who is measured (default %(default)s)")
    parser.add_argument("--add", action="store_true", help="to the rounds that the JSON has of this commit and machine")
    parser.add_argument("--model", default="smollm2", help="as for `tandem up` (default %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of `tandem up`, in one argument")
    parser.add_argument("--json", type=Path, default=CACHE / "disagg.json", help="where to write")
    arguments = parser.parse_args()
    arguments.modes = [name for name in arguments.modes.split(",") if name]
    if unknown := set(arguments.modes) - set(FLAGS):
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(FLAGS)}")
    return arguments


async def _run(arguments: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that the clusters are stopped
    record = load(arguments.json) if arguments.add else Record()
    weights = write_weights(arguments.model, CACHE)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        options = Options(weights, folder, [*COMMON_FLAGS, *shlex.split(arguments.flags)])
        clusters = {name: await _started(name, options, stack) for name in arguments.modes}
        gc.freeze()
        gc.disable()  # a collection of ours would be somebody's late token
        await _warm_up(clusters)
        await _measure(arguments, clusters, record)
    print_table(record)
    if not arguments.quick:
        write_json(arguments.json, record)
        write_document(record)
    return 1 if record.notes else 0


async def _started(name: str, options: Options, stack: AsyncExitStack) -> Engine:
    own = replace(options, folder=options.folder / name, flags=[*options.flags, *FLAGS[name]])
    own.folder.mkdir()
    return await stack.enter_async_context(tandem(own))


async def _warm_up(clusters: Mapping[str, Engine]) -> None:
    for workload in WARM_UP:
        await asyncio.gather(*(one.run(plan(workload, secrets.randbits(48), QUICK)) for one in clusters.values()))


async def _measure(arguments: argparse.Namespace, clusters: Mapping[str, Engine], record: Record) -> None:
    sizes = QUICK if arguments.quick else replace(Sizes(), mixed_s=arguments.seconds)
    for _ in range(1 if arguments.quick else arguments.rounds):
        for name in arguments.only or WORKLOADS:
            workload = plan(name, secrets.randbits(48), sizes)
            for mode, cluster in clusters.items():
                try:
                    found = figures(workload, await cluster.run(workload))
                except (Incomplete, NotStarted) as error:
                    record.notes.append(f"{mode}: {error}")
                else:
                    record.add(name, mode, found)
                    tell_progress(name, mode, found)


if __name__ == "__main__":
    sys.exit(main())
