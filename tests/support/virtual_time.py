"""An event loop whose time passes only when nothing else is left to do, and then at once.

What runs on it is as asynchronous as ever, in an order that depends on nothing but the sleeps: a test of minutes takes
milliseconds and gives the same result every time.
"""

import asyncio
import selectors


class _Clockwork(selectors.DefaultSelector):
    """Instead of waiting, lets the time pass for which it should wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never comes"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Threads and sockets have no place on it: it would not wait for them."""

    def __init__(self) -> None:
        self._clockwork = _Clockwork()
        super().__init__(self._clockwork)

    def time(self) -> float:
        """Return the virtual seconds that have passed."""
        return self._clockwork.now_s

    def pass_time(self, seconds: float) -> None:
        """Run what there is to do in that time."""
        self.run_until_complete(asyncio.sleep(seconds))

    def end(self) -> None:
        """Cancel what still runs, and close."""
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.close()
