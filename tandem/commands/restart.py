"""`tandem restart`: replace the processes of a running cluster one after the other."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from common.errors import StartupError
from common.lifecycle.exit_codes import EXIT_FAILURE, EXIT_OK
from common.settings.parse import parse_named
from common.settings.readers import number, path
from common.settings.setting import setting
from tandem.cluster.control import Done, RestartOrder, control_socket_in, give_order
from tandem.cluster.events import Failed, Restarted
from tandem.cluster.state import DEFAULT_STATE_DIR, ClusterState, StateDir
from tandem.console import complain, say
from tandem.invocation import invocation


@dataclass(frozen=True, kw_only=True)
class RestartSettings:
    """Restart processes of a running cluster, one after the other: each finishes what runs, and the next one follows
    when its successor is ready. Where there are two of a role, no request is lost.

    NAME is a process (decode-0) or a role (prefill, decode, gateway); without one, all but Redis are restarted.
    """

    state_dir: Path = setting(DEFAULT_STATE_DIR, "folder that was given to `tandem up`", path)
    timeout_s: float = setting(900.0, "longest wait for each new process to be ready", number(1, 86400), unit="seconds")


def run(argv: Sequence[str]) -> int:
    """Restart processes, a line for each; raise `StartupError` if there is no cluster to restart."""
    settings, names = parse_named(RestartSettings, argv, os.environ, "tandem restart", "NAME")
    state_dir = StateDir(settings.state_dir)
    state = state_dir.read_running()
    if state is None:
        raise StartupError(f"no cluster runs in {state_dir.path} (start one with: {invocation()} up)")
    return asyncio.run(_restart(state, RestartOrder(names, settings.timeout_s)))


async def _restart(state: ClusterState, order: RestartOrder) -> int:
    try:
        async with aclosing(give_order(control_socket_in(Path(state.run_dir)), order)) as replies:
            async for reply in replies:
                match reply:
                    case Restarted():
                        say(reply.line)
                    case Done():
                        return EXIT_OK
                    case Failed():
                        complain(reply.line)
                        return reply.exit_code
                    case _:
                        assert_never(reply)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        phase = "being stopped" if state.is_ready else "still starting"
        raise StartupError(f"the cluster is {phase}: nothing is restarted") from error
    complain("the cluster was stopped before everything was restarted")
    return EXIT_FAILURE
