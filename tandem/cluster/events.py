"""What a supervisor reports: to its own terminal, or through a pipe to the `up --detach` that started it in the
background. What outlasts the start goes to its log as well."""

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How much of the model each worker has loaded (0..1), by name, and who is ready to serve."""

    fractions: dict[str, float]
    num_ready: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The cluster answers at `url`. `is_exposed`: also to other hosts."""

    url: str
    model: str
    state_dir: str
    is_exposed: bool = False


class Died(msgspec.Struct, frozen=True, tag="died"):
    """A process ended that nobody had stopped; the next one starts in `delay_s`. `code` < 0: killed by that signal.

    `reason` is what it said if it refused to start.
    """

    name: str
    pid: int
    code: int
    delay_s: float
    reason: str = ""

    @property
    def line(self) -> str:
        """What happened, for people."""
        how = f"{_ending(self.code)}: {self.reason}" if self.reason else _ending(self.code)
        return f"{self.name} (pid {self.pid}) died ({how}), starting it again in {self.delay_s:g} s"


class NotStarted(msgspec.Struct, frozen=True, tag="not_started"):
    """The system did not let a process start, for `reason`; the next attempt is made in `delay_s`."""

    name: str
    delay_s: float
    reason: str

    @property
    def line(self) -> str:
        """What happened, for people."""
        return f"{self.name} could not be started ({self.reason}), trying again in {self.delay_s:g} s"


class Left(msgspec.Struct, frozen=True, tag="left"):
    """A process was told to leave by somebody else, and has done so in order; another one takes its seat in
    `delay_s`.
    """

    name: str
    pid: int
    delay_s: float

    @property
    def line(self) -> str:
        """What happened, for people."""
        return f"{self.name} (pid {self.pid}) has left, starting it again in {self.delay_s:g} s"


class Restarted(msgspec.Struct, frozen=True, tag="restarted"):
    """`tandem restart` has replaced a process, which took `duration_s`.

    `old_code` is how the old one ended: not 0 if it failed or did not leave in time (None: it had not been there).
    """

    name: str
    old_pid: int | None
    new_pid: int | None
    duration_s: float
    old_code: int | None = None

    @property
    def line(self) -> str:
        """What happened, for people."""
        old = "" if self.old_pid is None else f"{self.old_pid} -> "
        done = f"{self.name} restarted in {self.duration_s:.1f} s (pid {old}{self.new_pid})"
        return f"{done}; the old process ended by {_ending(self.old_code)}" if self.old_code else done


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The cluster was told to stop; running requests get `limit_s` to finish."""

    limit_s: float

    @property
    def line(self) -> str:
        """What happens now, for people."""
        return f"finishing what runs (at most {self.limit_s:g} s)"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The cluster does not come up; `line` tells why."""

    line: str
    exit_code: int


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


Event = Loading | Ready | Died | NotStarted | Left | Restarted | Draining | Failed
Narrator = Callable[[Event], None]

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def narrate_into(descriptor: int) -> Narrator:
    """Return a narrator that writes one JSON line per event into a pipe; a reader that has left is not missed."""

    def narrate(event: Event) -> None:
        with contextlib.suppress(OSError):
            os.write(descriptor, msgspec.json.encode(event) + b"\n")

    return narrate


def logged(narrate: Narrator, log_file: Path) -> Narrator:
    """Return a narrator that also appends what happens to a running cluster to `log_file`, one line each."""

    def narrate_and_log(event: Event) -> None:
        narrate(event)
        if isinstance(event, Died | NotStarted | Left | Restarted | Draining):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            # A full disk must not end a cluster that could go on.
            with contextlib.suppress(OSError), log_file.open("a", encoding="utf-8") as log:
                log.write(f"{time} {event.line}\n")

    return narrate_and_log


def events_from(descriptor: int) -> Iterator[Event]:
    """Yield the events in a pipe until its writers are gone."""
    with os.fdopen(descriptor, "rb") as pipe:
        for line in pipe:
            yield _decoder.decode(line)
