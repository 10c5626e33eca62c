"""How a process ends, so that whoever started it knows whether to start it again."""

import sys
from collections.abc import Callable
from typing import NoReturn

from common.errors import StartupError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: starting again would fail the same way."""
EXIT_INTERRUPTED = 130


def run_process(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process and exit with its result (None: 0).

    A `StartupError` becomes one line on stderr and exit code `EXIT_CONFIG`; a bug keeps its traceback.
    """
    try:
        code = main() or EXIT_OK
    except StartupError as error:
        sys.stderr.write(one_line(error) + "\n")
        code = EXIT_CONFIG
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise SystemExit(code)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())
