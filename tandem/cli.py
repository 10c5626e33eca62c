"""The command `tandem`: picks the subcommand. Subcommands are imported when they are called, so each starts quickly."""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from common.errors import StartupError, TandemError
from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK
from gateway.version import version
from tandem.console import complain, say
from tandem.invocation import invocation

COMMANDS = {
    "up": "start Redis, workers and gateways on this host and keep them running",
    "down": "stop the cluster that `up` started",
    "restart": "replace its processes one after the other, losing no request",
    "status": "show every process and the queues",
    "keys": "add, list, rotate and revoke the API keys of clients",
    "chat": "talk to a model in the terminal",
    "doctor": "show what this machine offers and what is missing",
    "bench": "measure a gateway under load (bench serve)",
}


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Return the exit code of a command line; what its user did wrong is told in one line."""
    try:
        return _dispatch(argv)
    except StartupError as error:
        complain(error)
        return EXIT_CONFIG
    except TandemError as error:
        complain(error)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough (`tandem status | head`); Python must not complain at exit.
        sys.stderr.close()
        return EXIT_FAILURE


def _dispatch(argv: Sequence[str]) -> int:
    match list(argv):
        case [] | ["-h" | "--help" | "help"]:
            say(_usage())
            return EXIT_OK
        case ["-V" | "--version", *_]:
            say(f"tandem {version()}")
            return EXIT_OK
        case [command, *rest] if command in COMMANDS:
            code: int = importlib.import_module(f"tandem.commands.{command}").run(rest)
            return code
        case [command, *_]:
            raise StartupError(f"no command {command!r}; there are {', '.join(COMMANDS)} (see {invocation()} --help)")
        case _:
            raise AssertionError(argv)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return "\n".join(
        (
            "usage: tandem COMMAND [FLAGS]",
            "",
            "Serve language models from separate prefill and decode workers behind one gateway.",
            "",
            *rows,
            "",
            "tandem COMMAND --help explains the flags of a command; most can also be set by TANDEM_* variables.",
            "tandem --version",
        )
    )
