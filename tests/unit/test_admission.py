"""Permits: bounded, released once, ended in order."""

import asyncio

import pytest

from common.errors import Draining, Overloaded
from gateway.admission import Admission


async def hold(admission: Admission) -> None:
    """Keep a permit until cancelled."""
    with admission.admit():
        await asyncio.Event().wait()


async def test_the_bound_and_its_release() -> None:
    admission = Admission(1)
    with admission.admit():
        with pytest.raises(Overloaded) as caught:
            admission.admit()
        assert caught.value.retry_after_s >= 1
    with admission.admit():
        assert admission.num_running == 1


async def test_retry_after_follows_the_drain_rate() -> None:
    now = 0.0
    admission = Admission(2, clock=lambda: now)
    for _ in range(100):
        with admission.admit():
            now += 10
    with admission.admit(), admission.admit(), pytest.raises(Overloaded) as caught:
        admission.admit()
    assert caught.value.retry_after_s == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
async def test_b104_released_on_every_exit(failure: type[BaseException]) -> None:
    admission = Admission(1)
    with pytest.raises(failure), admission.admit():
        raise failure
    assert admission.num_running == 0
    assert admission.end() == 0


async def test_a_second_release_does_nothing() -> None:
    admission = Admission(2)
    with admission.admit() as permit, admission.admit():
        admission.release(permit)
        admission.release(permit)
        assert admission.num_running == 1


async def test_b109_while_draining_requests_end_and_late_ones_are_served() -> None:
    admission, may_end = Admission(2), asyncio.Event()

    async def request() -> str:
        with admission.admit():
            await may_end.wait()
            return "whole"

    admission.begin_drain()
    running = asyncio.create_task(request())
    await asyncio.sleep(0)
    idle = asyncio.create_task(admission.wait_until_idle())
    await asyncio.sleep(0)
    assert admission.is_draining
    assert not idle.done()
    may_end.set()
    assert await running == "whole"
    await idle
    assert admission.end() == 0


async def test_b109_at_the_limit_the_rest_is_cut_and_new_ones_are_refused() -> None:
    admission = Admission(2)
    running = asyncio.create_task(hold(admission))
    await asyncio.sleep(0)
    assert admission.end() == 1
    with pytest.raises(Draining):
        await running
    with pytest.raises(Draining):
        admission.admit()
    assert admission.num_running == 0


async def test_a_cancel_from_outside_stays_a_cancel() -> None:
    admission = Admission(2)
    running = asyncio.create_task(hold(admission))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert admission.num_running == 0
