"""How the command speaks: answers on stdout, everything about the answer on stderr, one line per complaint."""

import sys

from rich.console import Console

from common.lifecycle.exit_codes import one_line

notes = Console(stderr=True, highlight=False, soft_wrap=True)
"""Progress and remarks."""


def say(text: str) -> None:
    """Write a line of the answer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def complain(error: BaseException | str) -> None:
    """Write why something did not work, on one line."""
    sys.stderr.write(f"tandem: {one_line(error) if isinstance(error, BaseException) else error}\n")
    sys.stderr.flush()


def table_console() -> Console:
    """Return the console for a table on stdout; a pipe gets whole lines, not ones cut at 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)
