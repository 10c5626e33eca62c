"""Tells a person how a cluster comes up: one progress bar per worker, then where it is and how to use it. Later only
what a person should know: deaths, restarts, and that a stop takes its time."""

from types import TracebackType
from typing import Self, assert_never

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tandem.cluster.events import Died, Draining, Event, Failed, Left, Loading, NotStarted, Ready, Restarted
from tandem.console import complain, notes, say
from tandem.invocation import invocation

EXPOSED = (
    "warning: clients are not authenticated yet, so anybody who reaches this port can use it: "
    "put an authenticating proxy in front"
)


class TerminalNarrator:
    """Shows the events of one cluster. Without a terminal there are no bars, only the beginning and the end."""

    def __init__(self, *, is_detached: bool) -> None:
        self._is_detached = is_detached
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        notes.print("starting ...")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Loading():
                self._show_loading(event)
            case Ready():
                self._progress.stop()
                say(greeting(event, is_detached=self._is_detached))
                if event.is_exposed:
                    notes.print(EXPOSED)
            case Died() | NotStarted() | Left() | Restarted():
                notes.print(event.line, markup=False)
            case Draining():
                self._progress.stop()
                notes.print(f"{event.line}; Ctrl-C again ends it now", markup=False)
            case Failed():
                self._progress.stop()
                complain(event.line)
            case _:
                assert_never(event)

    def _show_loading(self, loading: Loading) -> None:
        for name, fraction in loading.fractions.items():
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(f"{name} loads the model", total=1.0)
            self._progress.update(self._bars[name], completed=fraction)


def greeting(ready: Ready, *, is_detached: bool) -> str:
    """Return what a newcomer needs next."""
    body = f'{{"model":"{ready.model}","stream":true,"messages":[{{"role":"user","content":"Hello"}}]}}'
    tandem = invocation()
    down = f"{tandem} down --state-dir {ready.state_dir}"
    return "\n".join(
        (
            f"Tandem is ready at {ready.url} with model {ready.model}",
            "",
            f"  try     curl -N {ready.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
            f"  chat    {tandem} chat --url {ready.url}",
            f"  watch   {tandem} status --state-dir {ready.state_dir}",
            f"  stop    {down}" if is_detached else f"  stop    Ctrl-C, or {down}",
        )
    )
