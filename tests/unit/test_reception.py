"""One remote prefill as its decode worker sees it: a try is won by token and pages together, in any order."""

import asyncio

import pytest

from common.messages.ids import BlockId, Epoch, PlacementNumber, RequestId, TryNumber
from common.messages.logprobs import TokenLogprobs
from common.scheduling.sequence import SequenceKey
from common.transfer.protocols import PageCopy
from decode_worker.first_token import FirstToken
from decode_worker.reception import Attempt, AttemptLost, Commit, Reception, TryLoss
from proto import worker_pb2 as pb
from tests.support.broker_records import worker_record
from tests.support.polling import turns

KEY = SequenceKey(RequestId("r"), PlacementNumber(1))
COMMIT = Commit(FirstToken(7))


def make_reception(first_block: int = 2, num_blocks: int = 3) -> Reception:
    blocks = [BlockId(10 + index) for index in range(num_blocks)]
    return Reception(KEY, b"", frozenset({9}), first_block, blocks)


def begin(reception: Reception, number: int = 1) -> Attempt:
    return reception.begin(TryNumber(number))


def pages(*indices: int) -> list[pb.PageRef]:
    return [pb.PageRef(block_index=index, page=index + 100, generation=5) for index in indices]


async def test_pages_go_into_the_blocks_that_are_reserved_for_them() -> None:
    reception = make_reception()
    attempt = begin(reception)
    copies = reception.copies(attempt, pages(0, 1, 2, 4, 5, 1 << 31))
    assert copies == {2: PageCopy(102, 5, 10), 4: PageCopy(104, 5, 12)}  # type: ignore[arg-type]  # plain numbers


async def test_a_page_is_requested_once() -> None:
    reception = make_reception()
    attempt = begin(reception)
    attempt.requested.update(reception.copies(attempt, pages(2, 3)))
    assert set(reception.copies(attempt, pages(2, 3, 4))) == {4}
    assert set(reception.copies(begin(reception, 2), pages(2, 3, 4))) == {2, 3, 4}  # another try, another source


@pytest.mark.parametrize("order", [["commit", 2, 3, 4], [4, "commit", 2, 3], [2, 4, 3, "commit"]])
async def test_it_is_won_by_token_and_all_pages(order: list[str | int]) -> None:
    attempt = begin(make_reception())
    for step in order:
        assert not attempt.outcome.done()
        if isinstance(step, int):
            attempt.arrive([step])
        else:
            attempt.take_commit(COMMIT, is_last=False)
    assert await attempt.outcome == COMMIT


def test_what_a_commit_lacks_is_told_in_words() -> None:
    logprobs = TokenLogprobs(-1.0)
    reception = make_reception()
    assert reception.lacks(FirstToken(7)) == ""
    assert "2 tokens" in reception.lacks(FirstToken(7, prompt_logprobs=(logprobs, logprobs)))
    reception.wants_logprobs = True
    assert "first token" in reception.lacks(FirstToken(7))
    assert reception.lacks(FirstToken(7, logprobs=logprobs)) == ""
    reception.num_prompt_logprobs = 2
    assert "instead of 2" in reception.lacks(FirstToken(7, logprobs=logprobs))
    assert reception.lacks(FirstToken(7, logprobs=logprobs, prompt_logprobs=(logprobs, logprobs))) == ""


async def test_the_first_commit_counts() -> None:
    attempt = begin(make_reception())
    attempt.take_commit(COMMIT, is_last=False)
    attempt.take_commit(Commit(FirstToken(8, 1)), is_last=False)
    attempt.arrive([2, 3, 4])
    assert await attempt.outcome == COMMIT


async def test_b051_a_last_token_needs_no_pages() -> None:
    attempt = begin(make_reception())
    attempt.take_commit(COMMIT, is_last=True)
    assert await attempt.outcome == COMMIT
    attempt.arrive([2, 3, 4])
    attempt.take_commit(COMMIT, is_last=True)


async def test_nothing_wanted_but_the_token() -> None:
    attempt = begin(make_reception(num_blocks=0))
    attempt.take_commit(COMMIT, is_last=False)
    assert await attempt.outcome == COMMIT


async def test_a_lost_try_stays_lost() -> None:
    attempt = begin(make_reception())
    attempt.lose(TryLoss.DIED, "first reason")
    attempt.lose(TryLoss.OVER, "second reason")
    attempt.take_commit(COMMIT, is_last=True)
    attempt.arrive([2, 3, 4])
    with pytest.raises(AttemptLost, match="first reason") as lost:
        await attempt.outcome
    assert lost.value.loss is TryLoss.DIED


async def test_a_won_try_cannot_be_lost() -> None:
    attempt = begin(make_reception(num_blocks=0))
    attempt.take_commit(COMMIT, is_last=False)
    attempt.lose(TryLoss.SILENT, "too late")
    assert await attempt.outcome == COMMIT


async def test_it_belongs_to_the_first_incarnation_that_binds() -> None:
    attempt = begin(make_reception())
    first, restarted, other = worker_record("a", 1), worker_record("a", 2), worker_record("b", 1)
    assert not attempt.is_bound_to(1)
    assert not attempt.bound.is_set()
    assert attempt.bind(first)
    renewed_at = attempt.renewed_at
    assert attempt.bind(first)
    assert not attempt.bind(restarted)
    assert not attempt.bind(other)
    assert (attempt.source, attempt.renewed_at) == (first, renewed_at)
    assert attempt.bound.is_set()
    assert attempt.is_bound_to(Epoch(1))
    assert not attempt.is_bound_to(Epoch(2))


async def test_only_the_running_try_is_current() -> None:
    reception = make_reception()
    binding = pb.Binding(request="r", placement=1, try_number=2)
    assert reception.current(binding) is None
    first = begin(reception, 1)
    assert reception.current(binding) is None
    second = begin(reception, 2)
    assert reception.current(binding) is second
    second.lose(TryLoss.OVER, "over")
    assert reception.current(binding) is None
    assert [attempt.outcome.done() for attempt in (first, second)] == [False, True]
    assert isinstance(second.outcome.exception(), AttemptLost)


async def test_stopping_waits_for_every_copy() -> None:
    attempt = begin(make_reception())
    may_stop, num_stopped = asyncio.Event(), 0

    async def copy(error: Exception | None) -> None:
        nonlocal num_stopped
        try:
            await asyncio.Event().wait()
        finally:
            await may_stop.wait()  # a copy cannot be interrupted
            num_stopped += 1
            if error is not None:
                raise error

    for error in (None, ZeroDivisionError(), None):
        attempt.pulls.add(asyncio.create_task(copy(error)))
    await turns()
    stopping = asyncio.create_task(attempt.stop())
    await turns()
    assert not stopping.done()
    may_stop.set()
    await stopping
    assert num_stopped == 3


@pytest.mark.parametrize("loss", list(TryLoss))
def test_what_counts_against_the_request(loss: TryLoss) -> None:
    """A loss for which the request may be the cause, and no other."""
    counts = {TryLoss.DIED, TryLoss.SILENT, TryLoss.STALLED, TryLoss.FAILED, TryLoss.CORRUPT}
    assert loss.is_failure == (loss in counts)
