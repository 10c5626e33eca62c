"""What a supervisor reports while it brings a cluster up: to its own terminal, or through a pipe to the `up --detach`
that started it in the background."""

import contextlib
import os
from collections.abc import Callable, Iterator

import msgspec


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How much of the model each worker has loaded (0..1), by name, and who is ready to serve."""

    fractions: dict[str, float]
    num_ready: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The cluster answers at `url`."""

    url: str
    model: str
    state_dir: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The cluster does not come up; `line` tells why."""

    line: str
    exit_code: int


Event = Loading | Ready | Failed
Narrator = Callable[[Event], None]

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def narrate_into(descriptor: int) -> Narrator:
    """Return a narrator that writes one JSON line per event into a pipe; a reader that has left is not missed."""

    def narrate(event: Event) -> None:
        with contextlib.suppress(OSError):
            os.write(descriptor, msgspec.json.encode(event) + b"\n")

    return narrate


def events_from(descriptor: int) -> Iterator[Event]:
    """Yield the events in a pipe until its writers are gone."""
    with os.fdopen(descriptor, "rb") as pipe:
        for line in pipe:
            yield _decoder.decode(line)
