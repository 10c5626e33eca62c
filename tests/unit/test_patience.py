"""One timer for many waits."""

import asyncio
import socket
import time
from contextlib import closing

import pytest

from gateway import patience as patience_module
from gateway.patience import Patience


async def test_a_long_wait_ends() -> None:
    with closing(Patience(0.01)) as patience:
        for _ in range(2):
            with pytest.raises(TimeoutError), patience:
                await asyncio.Event().wait()
            assert patience.is_over
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_many_short_waits_go_on_beyond_the_limit() -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    with closing(Patience(0.05)) as patience:
        while loop.time() < start + 0.15:
            with patience:
                tick = asyncio.Event()
                loop.call_later(0.005, tick.set)
                await tick.wait()
            assert not patience.is_over


async def test_what_moves_is_waited_for() -> None:
    moves = [True, True, False]
    with closing(Patience(0.02, lambda: moves.pop(0))) as patience:
        with pytest.raises(TimeoutError), patience:
            await asyncio.Event().wait()
        assert patience.is_over
    assert moves == []


async def test_the_time_between_waits_does_not_count() -> None:
    with closing(Patience(0.02)) as patience:
        with patience:
            pass
        elsewhere = asyncio.Event()
        asyncio.get_running_loop().call_later(0.06, elsewhere.set)
        await elsewhere.wait()
        with patience:
            await asyncio.sleep(0)


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    async def wait() -> None:
        with closing(Patience(5)) as patience, patience:
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_timeouts_are_not_its_own() -> None:
    with closing(Patience(5)) as patience:
        with pytest.raises(TimeoutError), patience:
            raise TimeoutError
        assert not patience.is_over


async def test_our_own_pause_is_no_fault_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came meanwhile waits in the socket, and is read before anybody's patience ends."""
    monkeypatch.setattr(patience_module, "LATE_S", 0.05)
    reader, writer = await asyncio.open_connection(sock=_connected_pair(b"news"))
    with closing(Patience(0.1)) as patience:
        with patience:
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251 - the pause
            await asyncio.sleep(0.01)
            assert await reader.read(4) == b"news"
        assert not patience.is_over
    writer.close()


async def test_a_pause_gives_grace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "LATE_S", 0.05)
    monkeypatch.setattr(patience_module, "GRACE_S", 0.02)

    async def pause_and_wait() -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - the pause
        await asyncio.Event().wait()

    with closing(Patience(0.1)) as patience, pytest.raises(TimeoutError), patience:
        await pause_and_wait()


def _connected_pair(sent: bytes) -> socket.socket:
    """Return one end of a connection whose other end has sent that and is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(sent)
    return ours
