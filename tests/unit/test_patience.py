"""One timer for many waits."""

import asyncio
from contextlib import closing

import pytest

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
