"""SIGTERM and SIGINT (and a lost terminal) as events: the first asks the process to drain, the second to hurry."""

import asyncio
import signal
from types import TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Owns the process's handlers of `STOP_SIGNALS` while it is entered; belongs to the running loop's main thread."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal: finish what is running."""
        self.hurry = asyncio.Event()
        """Set by the second: finish at once."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        # Whoever started us with nohup wants a lost terminal to be ignored.
        self._handled = [number for number in STOP_SIGNALS if not _is_hangup_ignored(number)]
        for number in self._handled:
            self._loop.add_signal_handler(number, self.receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handled:
            self._loop.remove_signal_handler(number)

    def receive(self) -> None:
        """Take note of one signal."""
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()


def _is_hangup_ignored(number: signal.Signals) -> bool:
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
