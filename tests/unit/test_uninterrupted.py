"""Clean-up under a cancellation: it ends first, then the cancellation goes on."""

import asyncio

import pytest

from common.lifecycle.uninterrupted import uninterrupted
from tests.support.polling import turns


async def test_its_result_and_its_error_are_passed_on() -> None:
    async def work(value: int) -> int:
        await asyncio.sleep(0)
        return 10 // value

    assert await uninterrupted(work(5)) == 2
    with pytest.raises(ZeroDivisionError):
        await uninterrupted(work(0))


@pytest.mark.parametrize("num_cancels", [1, 3])
@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_cancelled_caller_waits_for_the_end_of_it(num_cancels: int, is_failing: bool) -> None:
    may_end, has_ended = asyncio.Event(), False

    async def work() -> None:
        nonlocal has_ended
        await may_end.wait()
        has_ended = True
        if is_failing:
            raise ZeroDivisionError

    caller = asyncio.create_task(uninterrupted(work()))
    await turns()
    for _ in range(num_cancels):
        caller.cancel()
        await turns()
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):  # whatever the work came to
        await caller
    assert has_ended


async def test_in_the_finally_of_a_cancelled_task() -> None:
    steps: list[str] = []

    async def clean_up() -> None:
        await turns()
        steps.append("cleaned")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await uninterrupted(clean_up())
            steps.append("behind")

    task = asyncio.create_task(work())
    await turns()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert steps == ["cleaned", "behind"]


async def test_a_timeout_around_it_strikes_afterwards() -> None:
    may_end = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, may_end.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await uninterrupted(may_end.wait())
    assert may_end.is_set()


async def test_work_that_is_cancelled_itself() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await uninterrupted(work())
