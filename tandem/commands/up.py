"""`tandem up`: start a cluster on this host and supervise it."""

import asyncio
import os
from collections.abc import Sequence

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_OK, one_line
from common.settings.parse import parse
from tandem.cluster.background import REPORT_VARIABLE, start_in_background
from tandem.cluster.bring_up import run_cluster
from tandem.cluster.events import Failed, Narrator, narrate_into
from tandem.cluster.settings import UpSettings
from tandem.cluster.state import StateDir
from tandem.cluster.terminal import TerminalNarrator
from tandem.console import notes


def run(argv: Sequence[str]) -> int:
    """Start a cluster; return when it has been stopped, or with `--detach` when it is ready."""
    settings = parse(UpSettings, argv, os.environ, "tandem up")
    report = os.environ.pop(REPORT_VARIABLE, None)
    if report is not None and not settings.detach:
        return _supervise(settings, narrate_into(int(report)))
    with TerminalNarrator(is_detached=settings.detach) as narrator:
        if settings.detach:
            return start_in_background(argv, StateDir(settings.state_dir), narrator)
        code = _supervise(settings, narrator)
    if code == EXIT_OK:
        notes.print("stopped")
    return code


def _supervise(settings: UpSettings, narrate: Narrator) -> int:
    try:
        asyncio.run(run_cluster(settings, narrate))
    except StartupError as error:
        narrate(Failed(one_line(error), EXIT_CONFIG))
        return EXIT_CONFIG
    return EXIT_OK
