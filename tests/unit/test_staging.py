"""Pages move between the model's memory and the peers' memory, and no other page does."""

from collections.abc import Sequence

import torch

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.ids import BlockId, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.runtime.staging import HostStaging
from common.scheduling.plan import StepResult
from common.scheduling.sequence import Sequence as ModelSequence
from common.scheduling.sequence import SequenceKey
from decode_worker import core as decode_core
from decode_worker.core import DecodeCore
from decode_worker.first_token import FirstToken
from decode_worker.placing import Bounds, Placing
from decode_worker.scheduler import DecodeScheduler
from prefill_worker import core as prefill_core
from prefill_worker.core import PrefillCore
from prefill_worker.scheduler import PrefillScheduler


def make_pages(value: float) -> torch.Tensor:
    return torch.full((5, 2, 3), value)


def test_published_pages_reach_the_host_alone() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).publish([BlockId(1), BlockId(4)])
    assert host[:, 0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert bool((device == 1.0).all())


def test_collected_pages_reach_the_device_alone() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).collect([BlockId(0)])
    assert device[:, 0, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert bool((host == 0.0).all())


def test_no_pages_is_no_work() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).publish([])
    assert bool((host == 0.0).all())


class Recorder:
    """Notes what a core has moved."""

    def __init__(self) -> None:
        self.published: list[BlockId] = []
        self.collected: list[BlockId] = []

    def publish(self, block_ids: Sequence[BlockId]) -> None:
        self.published += block_ids

    def collect(self, block_ids: Sequence[BlockId]) -> None:
        self.collected += block_ids


def make_sequence(max_tokens: int = 4) -> ModelSequence:
    key = SequenceKey(RequestId("r"), PlacementNumber(1))
    return ModelSequence(key, list(range(10)), 10, SamplingParams(seed=0, max_tokens=max_tokens), arrival=0)


def make_pool() -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(8, [0] * 8)
    return pool, PrefixCache(pool, 4, "f")


def test_a_prefill_worker_publishes_each_page_before_it_is_announced() -> None:
    pool, prefix = make_pool()
    recorder = Recorder()
    core = PrefillCore(PrefillScheduler(pool, prefix, block_size=4, token_budget=8, chunk_size=8), pool, recorder)
    sequence = make_sequence()
    core.obey(prefill_core.Admit(sequence))
    plan, _ = core.plan()
    (first,) = core.settle(plan, StepResult(tokens={}))
    assert [page.page for page in first.pages] == recorder.published == sequence.block_ids[:2]
    plan, _ = core.plan()
    (last,) = core.settle(plan, StepResult(tokens={sequence.key: 9}))
    assert [page.page for page in last.pages] == sequence.block_ids[2:]
    assert recorder.published == sequence.block_ids


def test_a_decode_worker_collects_received_pages_before_it_decodes() -> None:
    pool, prefix = make_pool()
    recorder = Recorder()
    scheduler = DecodeScheduler(
        pool, prefix, block_size=4, max_sequences=2, token_budget=8, chunk_size=8, max_context=32
    )
    core = DecodeCore(scheduler, pool, prefix, 4, Placing(Bounds(8, 8, 1.0), 0), recorder)
    sequence = make_sequence()
    core.obey(decode_core.Admit(sequence, may_go_remote=True))
    _, (reserved,) = core.plan()
    assert isinstance(reserved, decode_core.Reserved)
    assert recorder.collected == []
    core.obey(decode_core.Activate(sequence.key, FirstToken(9, 0)))
    assert recorder.collected == list(reserved.block_ids) == sequence.block_ids
    core.obey(decode_core.LetGo(sequence.key))


def test_an_answer_that_ends_with_its_first_token_collects_nothing() -> None:
    pool, prefix = make_pool()
    recorder = Recorder()
    scheduler = DecodeScheduler(
        pool, prefix, block_size=4, max_sequences=2, token_budget=8, chunk_size=8, max_context=32
    )
    core = DecodeCore(scheduler, pool, prefix, 4, Placing(Bounds(8, 8, 1.0), 0), recorder)
    sequence = make_sequence(max_tokens=1)
    core.obey(decode_core.Admit(sequence, may_go_remote=True))
    core.plan()
    assert len(list(core.obey(decode_core.Activate(sequence.key, FirstToken(9, 0))))) == 1
    assert recorder.collected == []
