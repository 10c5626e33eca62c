"""Whom a gateway proposes when there are more workers than Redis should look at."""

from collections.abc import Sequence

from common.broker.protocols import Candidate, PrefixNews
from common.messages.codec import pack_ids
from common.messages.ids import Epoch, WorkerId
from common.messages.prefixes import NO_PREFIXES, PromptPrefixes, name_prefixes
from common.messages.registry import WorkerState
from gateway.placement import MAX_CANDIDATES, MAX_HOLDERS, shortlist
from tests.support.broker_records import FINGERPRINT, worker_load, worker_record

WORKERS = [WorkerState(worker_record(f"decode-{number}"), worker_load(), 0.0) for number in range(40)]
PROMPT = name_prefixes(pack_ids(range(1000)), 16, FINGERPRINT, "")


class Index:
    """Some workers have a part of the prompt."""

    def __init__(self, **depths: int) -> None:
        self._depths = {WorkerId(name.replace("_", "-")): depth for name, depth in depths.items()}

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Nobody tells anything."""
        raise AssertionError(worker, epoch, news)

    async def depths(self, workers: Sequence[tuple[WorkerId, Epoch]], prefixes: PromptPrefixes) -> list[int]:
        """Return what each has."""
        assert prefixes == PROMPT
        return [self._depths.get(worker, 0) for worker, _ in workers]


def numbers(candidates: Sequence[Candidate]) -> list[int]:
    """Return who they are."""
    return [int(candidate.worker.split("-")[1]) for candidate in candidates]


async def test_those_that_have_most_of_the_prompt_are_among_them() -> None:
    index = Index(decode_30=3, decode_20=9, decode_2=1)
    assert numbers(await shortlist(index, WORKERS, PROMPT)) == [20, 30, 2, 0, 1, 3, 4, 5]


async def test_so_are_those_with_little_to_do() -> None:
    everybody = Index(**{f"decode_{number}": 1 + number for number in range(40)})
    chosen = numbers(await shortlist(everybody, WORKERS, PROMPT))
    assert chosen == [39, 38, 37, 36, 0, 1, 2, 3]
    assert (len(chosen), MAX_HOLDERS) == (MAX_CANDIDATES, 4)


async def test_without_a_prompt_to_find_the_least_loaded_are_proposed() -> None:
    for index, prefixes in ((None, PROMPT), (Index(decode_30=3), NO_PREFIXES)):
        assert numbers(await shortlist(index, WORKERS, prefixes)) == list(range(MAX_CANDIDATES))
    assert numbers(await shortlist(Index(decode_3=3), WORKERS[:5], PROMPT)) == [0, 1, 2, 3, 4]
