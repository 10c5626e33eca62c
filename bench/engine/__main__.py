"""`python -m bench.engine`: the step time of the engine by batch and context, beside what the machine allows.

No server runs: plans go to the runner that a worker has. Each number of threads has a process of its own.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.engine.report import HEAD, is_complete, limit_lines, rows, write_document, write_json
from bench.engine.steps import Machine, Measured
from bench.machine import CACHE
from common.settings.engine import KERNELS


def main() -> int:
    """Measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default %(default)s)")
    parser.add_argument("--only", choices=("decode", "prefill"), help="these steps alone")
    parser.add_argument("--model", default="smollm2", help="as for `tandem up` (default %(default)s)")
    parser.add_argument("--kernels", choices=KERNELS, default="auto", help="as for `tandem up` (default %(default)s)")
    parser.add_argument("--json", type=Path, default=CACHE / "engine.json", help="where to write (default %(default)s)")
    arguments = parser.parse_args()
    more = [
        "--model",
        arguments.model,
        "--kernels",
        arguments.kernels,
        *(["--only", arguments.only] if arguments.only else []),
    ]
    machines, measured = list[Machine](), list[Measured]()
    for threads in map(int, arguments.threads.split(",")):
        for line in _lines(threads, more):
            fields = msgspec.json.decode(line)
            if fields.pop("type") == "Machine":
                machines.append(msgspec.convert(fields, Machine))
            else:
                measured.append(msgspec.convert(fields, Measured))
                sys.stderr.write("  ".join(rows(measured[-1:])[0]) + "\n")
    _print(machines, measured)
    write_json(arguments.json, machines, measured)
    if is_complete(machines, measured) and arguments.threads == parser.get_default("threads"):
        write_document(machines, measured)
    return 0


def _lines(threads: int, more: list[str]) -> Iterator[str]:
    """Yield what a process that measures says, as it says it; raises `CalledProcessError` if it fails."""
    command = [sys.executable, "-m", "bench.engine.steps", "--threads", str(threads), *more]
    as_worker = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **as_worker}) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _print(machines: list[Machine], measured: list[Measured]) -> None:
    console = Console(width=110)
    for line in limit_lines(machines):
        console.print(line, highlight=False)
    table = Table(title="steps of the engine, medians")
    for place, title in enumerate(HEAD):
        table.add_column(title, justify="right" if place else "left")
    for row in rows(measured):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
