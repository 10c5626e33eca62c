"""`python -m tests.soak`: random faults under a mixed load, judged all the time, for as long as asked.

Every answer that ends must be the undisturbed one, token for token; an error is allowed only to a request that may have
met a fault; nobody is left hanging. After every round nothing may be held anywhere (I2), and over the whole run memory
and open files of every process must be flat. Exits with 1 if anything is wrong, and then leaves the logs.
"""

import argparse
import asyncio
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.report import Report
from tests.soak.soak import Options, say, soak


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="a round that has begun is ended (default: 10)")
    parser.add_argument("--seed", type=int, default=None, help="of load and faults (default: drawn and printed)")
    parser.add_argument("--clients", type=int, default=14, help="clients that ask at the same time (default: 14)")
    parser.add_argument("--round-s", type=float, default=30.0, help="faults come for so long, then peace (default: 30)")
    parser.add_argument("--set", metavar="TANDEM_NAME=VALUE", action="append", default=[], help="of all processes")
    parser.add_argument("--json", type=Path, help="write everything that was found here")
    arguments = parser.parse_args()
    options = Options(
        minutes=arguments.minutes,
        seed=secrets.randbelow(10**6) if arguments.seed is None else arguments.seed,
        num_clients=arguments.clients,
        round_s=arguments.round_s,
        settings=dict(setting.split("=", 1) for setting in arguments.set),
    )
    folder = Path(tempfile.mkdtemp(prefix="tandem-soak-"))
    say(f"seed {options.seed}, logs in {folder}")
    report = Report(options, asyncio.run(soak(options, folder)), folder)
    if arguments.json is not None:
        report.write(arguments.json)
    say("\n".join(report.lines()))
    if not report.is_good:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
