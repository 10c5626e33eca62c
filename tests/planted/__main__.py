"""`python -m tests.planted`: plant every bug of the catalogue, one at a time, and see that the tests kill it.

Exits with 1 unless all of them are killed. For nights: it takes minutes.
"""

import argparse
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.planted.catalogue import PLANTS
from tests.planted.plant import Plant
from tests.planted.workshop import Report, Verdict, Workshop

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="try this plant alone; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="plants tried side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="print every plant with its rule, and try none")
    arguments = parser.parse_args()
    plants = [plant for plant in PLANTS if not arguments.only or plant.name in arguments.only]
    unknown = sorted(set(arguments.only or ()) - {plant.name for plant in plants})
    if unknown:
        parser.error(f"no such plant: {', '.join(unknown)}")
    if arguments.list:
        for plant in plants:
            _say(f"{plant.name:28} {plant.rule}")
        return 0
    with TemporaryDirectory(prefix="tandem-planted-") as folder:
        workshops = [Workshop(ROOT, Path(folder) / str(number)) for number in range(arguments.jobs)]
        if not _is_sound(workshops[0], plants):
            return 1
        reports = _try_out(workshops, plants)
    survivors = [report for report in reports if report.verdict is not Verdict.KILLED]
    _say(f"{len(reports) - len(survivors)} of {len(reports)} planted bugs were killed")
    for report in survivors:
        _say(f"\n{report.verdict}: {report.plant.name}: {report.plant.rule}\n{report.details}")
    return 1 if survivors else 0


def _is_sound(workshop: Workshop, plants: Sequence[Plant]) -> bool:
    """Whether the tests pass where nothing is planted: a test that always fails kills nothing."""
    tests = sorted({test for plant in plants for test in plant.tests})
    _say(f"{len(tests)} tests without any bug ...")
    code, output = workshop.run(tests)
    if code:
        _say(output)
    return not code


def _try_out(workshops: Sequence[Workshop], plants: Sequence[Plant]) -> list[Report]:
    free: queue.SimpleQueue[Workshop] = queue.SimpleQueue()
    for workshop in workshops:
        free.put(workshop)

    def try_out(plant: Plant) -> Report:
        workshop = free.get()
        try:
            report = workshop.try_out(plant)
        finally:
            free.put(workshop)
        _say(f"{report.verdict:12} {plant.name} ({report.duration_s:.0f} s)")
        return report

    with ThreadPoolExecutor(len(workshops)) as threads:
        return list(threads.map(try_out, plants))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
