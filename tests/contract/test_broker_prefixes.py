"""What workers have in their caches draws prompts to them, over every broker, and never all prompts to one of them."""

import asyncio
from collections import Counter

import msgspec
import pytest

from common.broker.protocols import Placed, PrefixNews
from common.messages.codec import pack_ids
from common.messages.ids import WorkerId
from common.messages.job import Job
from common.messages.prefixes import PromptPrefixes, name_prefixes
from tests.support.broker_calls import candidate
from tests.support.broker_harness import Broker
from tests.support.broker_records import D0, D1, D2, EPOCH, FINGERPRINT, make_job, worker_load, worker_record

FOUR = [WorkerId(f"decode-{number}") for number in range(4)]


def prompt(num_tokens: int, first: int = 0) -> PromptPrefixes:
    """Return the prefixes of a prompt; prompts of the same `first` begin alike."""
    return name_prefixes(pack_ids(range(first, first + num_tokens)), 16, FINGERPRINT, "")


def job(request: str, num_tokens: int) -> Job:
    """Return a job with a prompt of that length."""
    return msgspec.structs.replace(make_job(request), num_prompt_tokens=num_tokens, prompt=None)


async def begin(broker: Broker, *workers: WorkerId, num_running: int = 0) -> None:
    """Let workers with much room beat."""
    for worker in workers:
        record = worker_record(worker, num_blocks=10**6, max_sequences=500)
        await broker.registry.beat(record, worker_load(10**6, num_running=num_running))


async def tell(broker: Broker, worker: WorkerId, prefixes: PromptPrefixes, num_grains: int | None = None) -> None:
    """Tell that a worker has the first prefixes of a prompt, or all."""
    assert await broker.prefixes.tell(worker, EPOCH, PrefixNews(0, prefixes.names[:num_grains]))


class TestOverlap:
    async def test_the_worker_that_has_the_prompt_gets_it(self, broker: Broker) -> None:
        await begin(broker, D0, D1, D2)
        conversation = prompt(900)
        await tell(broker, D1, conversation)
        candidates = [candidate(D0), candidate(D1), candidate(D2)]
        assert await broker.jobs.place(job("turn", 1000), 10, candidates, prompt(1000)) == Placed(D1, EPOCH)
        assert await broker.jobs.place(job("other", 1000), 10, candidates, prompt(1000, 7)) == Placed(D0, EPOCH)

    async def test_the_one_with_most_of_it_gets_it(self, broker: Broker) -> None:
        await begin(broker, D0, D1, D2)
        whole = prompt(1000)
        for worker, num_grains in ((D0, 2), (D1, 9), (D2, 5)):
            await tell(broker, worker, whole, num_grains)
        candidates = [candidate(D0), candidate(D1), candidate(D2)]
        assert await broker.jobs.place(job("a", 1000), 10, candidates, whole) == Placed(D1, EPOCH)

    async def test_a_little_overlap_does_not_outweigh_load(self, broker: Broker) -> None:
        await begin(broker, D0, num_running=2)
        await begin(broker, D1)
        await tell(broker, D0, prompt(64))
        both = candidate(D0), candidate(D1)
        assert await broker.jobs.place(job("a", 70), 10, both, prompt(70)) == Placed(D1, EPOCH)

    @pytest.mark.parametrize("num_cached", [512, 40_000])
    async def test_many_prompts_that_begin_alike_are_spread(self, broker: Broker, num_cached: int) -> None:
        """However much one worker has of them."""
        await begin(broker, *FOUR)
        shared = prompt(num_cached)
        await tell(broker, FOUR[2], shared)
        candidates = [candidate(worker) for worker in FOUR]
        jobs = [job(f"r{number}", num_cached + 30) for number in range(100)]
        placed = await asyncio.gather(*(broker.jobs.place(one, 10, candidates, shared) for one in jobs))
        counts = Counter(answer.worker for answer in placed if isinstance(answer, Placed))
        assert sum(counts.values()) == 100
        assert max(counts.values()) == counts[FOUR[2]] <= 1.5 * 25
        assert min(counts.values()) >= 25 / 1.5

    async def test_equal_workers_get_equally_much(self, broker: Broker) -> None:
        await begin(broker, *FOUR)
        candidates = [candidate(worker) for worker in FOUR]
        jobs = [job(f"r{number}", 300) for number in range(100)]
        placed = await asyncio.gather(*(broker.jobs.place(one, 10, candidates, prompt(300)) for one in jobs))
        counts = Counter(answer.worker for answer in placed if isinstance(answer, Placed))
        assert set(counts.values()) == {25}

    async def test_a_long_prompt_weighs_more_than_a_short_one(self, broker: Broker) -> None:
        """What is on its way to a worker counts at once, by what has to be computed."""
        await begin(broker, D0, D1)
        both = candidate(D0), candidate(D1)
        assert await broker.jobs.place(job("long", 1000), 10, both) == Placed(D0, EPOCH)
        placed = [await broker.jobs.place(job(request, 50), 10, both) for request in "abc"]
        assert placed == [Placed(D1, EPOCH)] * 3


class TestNews:
    async def test_changes_add_up(self, broker: Broker) -> None:
        await begin(broker, D0, D1)
        names = prompt(640).names
        assert await broker.prefixes.tell(D1, EPOCH, PrefixNews(0, names[:5]))
        assert await broker.prefixes.tell(D1, EPOCH, PrefixNews(5, names[5:], names[:5]))
        both = candidate(D0), candidate(D1)
        assert await broker.jobs.place(job("a", 640), 10, both, prompt(640)) == Placed(D1, EPOCH)
        assert await broker.prefixes.tell(D1, EPOCH, PrefixNews(5, [], names[5:]))
        assert await broker.jobs.place(job("b", 640), 10, both, prompt(640)) == Placed(D0, EPOCH)

    async def test_a_wrong_count_forgets_all(self, broker: Broker) -> None:
        await begin(broker, D0, D1)
        names = prompt(640).names
        assert not await broker.prefixes.tell(D1, EPOCH, PrefixNews(3, names))
        assert await broker.prefixes.tell(D1, EPOCH, PrefixNews(0, names))
        assert not await broker.prefixes.tell(D1, EPOCH, PrefixNews(0, names))
        assert await broker.jobs.place(job("a", 640), 10, [candidate(D0), candidate(D1)], prompt(640)) == Placed(
            D0, EPOCH
        )

    async def test_a_worker_takes_what_it_had_with_it(self, broker: Broker) -> None:
        await begin(broker, D0, D1)
        await tell(broker, D1, prompt(640))
        await broker.registry.leave(D1, EPOCH)
        await begin(broker, D1)
        assert await broker.prefixes.tell(D1, EPOCH, PrefixNews(0))
        assert await broker.jobs.place(job("a", 640), 10, [candidate(D0), candidate(D1)], prompt(640)) == Placed(
            D0, EPOCH
        )

    async def test_nothing_to_tell_is_a_check(self, broker: Broker) -> None:
        await begin(broker, D0)
        assert await broker.prefixes.tell(D0, EPOCH, PrefixNews(0))
        assert not await broker.prefixes.tell(D0, EPOCH, PrefixNews(1))

    async def test_all_workers_are_asked_at_once(self, broker: Broker) -> None:
        await begin(broker, D0, D1, D2)
        await tell(broker, D0, prompt(640))
        await tell(broker, D2, prompt(200))
        everybody = [(worker, EPOCH) for worker in (D0, D1, D2)]
        assert await broker.prefixes.depths(everybody, prompt(640)) == [10, 0, 3]
        assert await broker.prefixes.depths(everybody, prompt(640, 7)) == [0, 0, 0]
