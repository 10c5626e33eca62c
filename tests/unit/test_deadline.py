"""The header that names a request's time, and the limit that it becomes."""

import asyncio

import pytest

from common.errors import DeadlineExceeded, InvalidRequest
from gateway.deadline import HEADER, MAX_MS, Deadline, limit_of


@pytest.mark.parametrize(("sent", "seconds"), [("1", 0.001), ("1500", 1.5), ("0042", 0.042), (str(MAX_MS), 86_400.0)])
def test_the_header_counts_milliseconds(sent: str, seconds: float) -> None:
    assert limit_of([sent], 600.0) == seconds


@pytest.mark.parametrize("default_s", [600.0, None])
def test_without_it_the_default_holds(default_s: float | None) -> None:
    assert limit_of([], default_s) == default_s


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "0",
        "-1",
        "+1",
        "1.5",
        "1e3",
        "0x10",
        "1_000",
        "ten",
        "NaN",
        "1,2",
        "1 2",
        "٣",
        "²",
        "9" * 400,
        str(MAX_MS + 1),
    ],
)
def test_anything_else_is_refused_by_name(sent: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{HEADER}.*{MAX_MS}") as refusal:
        limit_of([sent], None)
    assert refusal.value.param == HEADER


def test_two_of_them_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        limit_of(["5", "5"], None)


def test_it_counts_from_the_arrival() -> None:
    now_s = 100.0
    deadline = Deadline(5.0, 98.0, clock=lambda: now_s)
    assert deadline.left_s == 3.0
    now_s = 104.0
    assert deadline.left_s == -1.0
    assert Deadline(None, 98.0).left_s is None


async def test_the_block_ends_with_it() -> None:
    loop = asyncio.get_running_loop()
    deadline = Deadline(0.01, loop.time(), clock=loop.time)
    with pytest.raises(DeadlineExceeded):
        async with deadline.enforced():
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_one_that_is_over_already_ends_it_at_the_first_wait() -> None:
    with pytest.raises(DeadlineExceeded):
        async with Deadline(1.0, 0.0, clock=lambda: 50.0).enforced():
            await asyncio.Event().wait()


async def test_other_timeouts_are_not_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline(60.0, 0.0, clock=lambda: 0.0).enforced():
            raise TimeoutError


async def test_the_block_s_own_error_wins() -> None:
    """As when the engine notices first that the time is over."""

    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise DeadlineExceeded("mine") from error

    with pytest.raises(DeadlineExceeded, match="mine"):
        async with Deadline(1.0, 0.0, clock=lambda: 50.0).enforced():
            await fail()
