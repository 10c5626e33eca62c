"""Backoff: doubles up to a bound, and is spread."""

from itertools import islice

import pytest

from common.broker.backoff import Retry, backoff


def test_delays_double_up_to_the_longest() -> None:
    delays = list(islice(backoff(lambda: 0.5, first_s=0.1, longest_s=0.5), 5))
    assert delays == pytest.approx([0.075, 0.15, 0.3, 0.375, 0.375])


def test_delays_are_spread_over_the_upper_half() -> None:
    assert next(backoff(lambda: 0.0, first_s=1.0)) == 0.5
    assert next(backoff(lambda: 0.999, first_s=1.0)) == pytest.approx(1.0, abs=0.001)


async def test_a_loop_waits_longer_from_failure_to_failure_and_shortly_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr("common.broker.backoff.asyncio.sleep", sleep)
    retry = Retry(lambda: 0.0)
    for _ in range(3):
        await retry.pause()
    retry.succeed()
    await retry.pause()
    assert slept == [0.025, 0.05, 0.1, 0.025]
