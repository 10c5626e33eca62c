"""The prefill worker's engine policy: which pages are told, when, and under which generation."""

import zlib

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.scheduling.emission import FailureCode
from common.scheduling.plan import StepResult
from common.scheduling.sequence import Sequence, SequenceKey
from prefill_worker.core import Admit, PageReady, PrefillCore, Release, SpanReady
from prefill_worker.scheduler import PrefillScheduler
from tests.support.sequences import key, sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 8


class Core:
    """A prefill core whose steps sample the token 7, or fail for the keys in `invalid`."""

    def __init__(self, chunk_size: int = 6) -> None:
        self.generations = [10] * NUM_BLOCKS
        self.pool = BlockPool(NUM_BLOCKS, self.generations)
        prefix = PrefixCache(self.pool, BLOCK_SIZE, "fingerprint")
        scheduler = PrefillScheduler(self.pool, prefix, block_size=BLOCK_SIZE, token_budget=16, chunk_size=chunk_size)
        self.core = PrefillCore(scheduler, self.pool)
        self.invalid: frozenset[SequenceKey] = frozenset()

    def admit(self, one: Sequence) -> list[SpanReady]:
        return list(self.core.obey(Admit(one)))

    def step(self) -> list[SpanReady]:
        plan, events = self.core.plan()
        assert not list(events)
        tokens = {chunk.sequence.key: 7 for chunk in plan.chunks if chunk.samples}
        return list(self.core.settle(plan, StepResult(tokens, self.invalid)))

    @property
    def is_idle(self) -> bool:
        self.pool.check()
        load = self.core.load(0)
        return load.blocks_free == NUM_BLOCKS and load.num_running + load.num_waiting + load.num_reserved == 0


def indices(span: SpanReady) -> list[int]:
    return [page.block_index for page in span.pages]


def test_full_pages_are_told_once_and_the_last_one_with_the_token() -> None:
    core = Core()
    core.admit(sequence("a", range(18)))
    spans = [core.step()[0] for _ in range(3)]
    assert [indices(span) for span in spans] == [[0], [1, 2], [3, 4]]
    assert [span.token for span in spans] == [None, None, 7]
    assert core.step() == []


def test_a_chunk_that_fills_no_page_tells_none() -> None:
    core = Core(chunk_size=3)
    core.admit(sequence("a", range(7)))
    assert [indices(core.step()[0]) for _ in range(3)] == [[], [0], [1]]


def test_a_page_is_named_by_its_place_and_generation() -> None:
    core = Core()
    core.admit(sequence("a", range(4)))
    (span,) = core.step()
    (page,) = span.pages
    assert page == PageReady(0, page.page, 10)  # type: ignore[arg-type]  # a plain number
    core.core.obey(Release(key("a")))
    core.admit(sequence("b", range(50, 82)))  # needs every page, also the cached one
    while not (spans := core.step()) or spans[0].token is None:
        pass
    assert core.generations[page.page] > 10


def test_verified_pages_are_told_with_the_checksums_of_what_peers_reach() -> None:
    core = Core()
    pages = [bytearray([number]) * 32 for number in range(NUM_BLOCKS)]
    core.core = PrefillCore(core.core._scheduler, core.pool, None, lambda block: memoryview(pages[block]))
    core.admit(sequence("a", range(6)))
    (span,) = core.step()
    assert [page.checksum for page in span.pages] == [zlib.crc32(pages[page.page]) for page in span.pages]
    assert len({page.checksum for page in span.pages}) == 2


def test_cached_pages_are_told_too() -> None:
    core = Core(chunk_size=16)
    core.admit(sequence("a", range(16)))
    core.step()
    core.admit(sequence("b", range(16), arrival=1))
    (span,) = core.step()
    assert indices(span) == [0, 1, 2, 3]
    assert (span.token, span.num_cached) == (7, 12)


def test_pages_are_held_until_they_are_released() -> None:
    core = Core()
    core.admit(sequence("a", range(4)))
    core.step()
    assert core.core.load(5).num_reserved == 1
    assert core.core.load(5).num_steps == 5
    assert core.pool.num_free == NUM_BLOCKS - 1
    core.core.obey(Release(key("a")))
    core.core.obey(Release(key("a")))
    assert core.is_idle


def test_b049_a_released_prompt_is_not_computed_any_further() -> None:
    core = Core()
    core.admit(sequence("a", range(18)))
    core.step()
    core.core.obey(Release(key("a")))
    assert core.step() == []
    assert core.is_idle
    core.admit(sequence("a", range(18)))  # under the same name again: told from its first page on
    assert indices(core.step()[0])[0] == 0


def test_b042_a_prompt_that_does_not_fit_says_so() -> None:
    core = Core()
    (span,) = core.admit(sequence("a", range(NUM_BLOCKS * BLOCK_SIZE + 1)))
    assert span.pages == ()
    assert span.token is None
    assert span.failure is not None
    assert "33" in span.failure
    assert "32" in span.failure
    core.core.obey(Release(key("a")))
    assert core.is_idle


def test_a_prompt_without_valid_logits_fails_alone() -> None:
    core = Core()
    core.admit(sequence("bad", range(4)))
    core.admit(sequence("good", range(50, 54), arrival=1))
    core.invalid = frozenset({key("bad")})
    spans = {span.key: span for span in core.step()}
    assert (spans[key("bad")].failure, spans[key("bad")].pages) == (FailureCode.INVALID_LOGITS, ())
    assert (spans[key("good")].failure, spans[key("good")].token) == (None, 7)
    core.core.obey(Release(key("bad")))
    core.core.obey(Release(key("good")))
    assert core.is_idle
