"""A copy in a thread never outlives the coroutine that waits for it, however often that is cancelled."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.transfer.copy_thread import run_to_end
from tests.support.polling import turns, until


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_a_cancelled_copy_returns_when_its_thread_has_ended(thread: ThreadPoolExecutor) -> None:
    has_begun, may_end, is_interrupted = threading.Event(), threading.Event(), threading.Event()
    written: list[str] = []

    def copy() -> None:
        has_begun.set()
        may_end.wait()
        written.append("late")

    pull = asyncio.create_task(run_to_end(thread, copy, is_interrupted.set))
    await until(has_begun.is_set, "the copy runs")
    try:
        for _ in range(3):
            pull.cancel()
            await turns()
            assert is_interrupted.is_set()
            assert not pull.done(), "whoever waits would give the page away under a running copy"
    finally:
        may_end.set()
    await asyncio.wait({pull})
    assert pull.cancelled()
    assert written == ["late"]


async def test_a_copy_that_has_not_begun_never_begins(thread: ThreadPoolExecutor) -> None:
    may_end, is_interrupted = threading.Event(), threading.Event()
    written: list[str] = []
    thread.submit(may_end.wait)
    pull = asyncio.create_task(run_to_end(thread, lambda: written.append("late"), is_interrupted.set))
    await turns()
    pull.cancel()
    await asyncio.wait({pull})
    assert pull.cancelled()
    may_end.set()
    await asyncio.to_thread(thread.submit(str).result)  # all that stood before it is over
    assert written == []
    assert not is_interrupted.is_set()


async def test_its_result_and_its_error_are_passed_on(thread: ThreadPoolExecutor) -> None:
    assert await run_to_end(thread, lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        await run_to_end(thread, lambda: 1 // 0, lambda: None)
