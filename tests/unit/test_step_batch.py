"""The tensors of a step say what its chunks are, whatever the steps before were."""

import random

import pytest
import torch

from common.messages.ids import BlockId, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.runtime.block_tables import BlockTables
from common.runtime.step_batch import forward_batch
from common.scheduling.plan import Chunk
from common.scheduling.sequence import Sequence, SequenceKey

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def sequence(number: int, num_tokens: int, *, scored: bool = False) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=9, num_prompt_logprobs=0 if scored else None)
    key = SequenceKey(RequestId(str(number)), PlacementNumber(0))
    ids = [1000 * number + token for token in range(num_tokens)]
    return Sequence(key, ids, num_tokens, sampling, number)


def test_chunks_of_several_lengths() -> None:
    long, short, asks = sequence(1, 9), sequence(2, 3), sequence(3, 6, scored=True)
    long.block_ids = [BlockId(block) for block in (7, 3, 5)]
    short.block_ids = [BlockId(2)]
    asks.block_ids = [BlockId(9), BlockId(1)]
    chunks = [Chunk(long, 8, 1, samples=True), Chunk(short, 1, 2, samples=True), Chunk(asks, 2, 3, samples=False)]
    batch = forward_batch(chunks, BLOCK_SIZE, CPU, BlockTables())
    assert batch.token_ids.tolist() == [1008, 2001, 2002, 3002, 3003, 3004]
    assert batch.positions.tolist() == [8, 1, 2, 2, 3, 4]
    assert batch.slots.tolist() == [5 * 4, 2 * 4 + 1, 2 * 4 + 2, 9 * 4 + 2, 9 * 4 + 3, 1 * 4]
    assert batch.wanted.tolist() == [0, 2, 3, 4, 5]
    assert list(batch.query_lengths) == [1, 2, 3]
    assert list(batch.context_lengths) == [9, 3, 5]
    assert [row[:count] for row, count in zip(batch.block_tables.tolist(), (3, 1, 2), strict=True)] == [
        [7, 3, 5],
        [2],
        [9, 1],
    ]
    integers = (batch.token_ids, batch.positions, batch.slots, batch.wanted, batch.block_tables)
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in integers)


@pytest.mark.parametrize("seed", range(5))
def test_kept_tables_are_those_of_now(seed: int) -> None:
    """Sequences come, grow, lose their blocks, get others, pause and go."""
    draw = random.Random(seed)
    tables = BlockTables()
    alive: list[Sequence] = []
    for step in range(120):
        if len(alive) < 20 and draw.random() < 0.5:
            alive.append(sequence(step, 1))
        for one in list(alive):
            match draw.randrange(8):
                case 0:
                    alive.remove(one)
                case 1:
                    one.block_ids = []
                case 2:
                    one.block_ids = one.block_ids[: draw.randrange(3)]
                case _:
                    one.block_ids += [BlockId(draw.randrange(10**6)) for _ in range(draw.choice((0, 0, 1, 40)))]
        running = [one for one in alive if one.block_ids and draw.random() < 0.8]
        draw.shuffle(running)
        if not running:
            continue
        counts = [draw.randint(1, len(one.block_ids)) for one in running]
        found = tables.of([Chunk(one, 0, 1, samples=True) for one in running], counts)
        assert found.shape == (len(running), max(counts))
        for row, one, count in zip(found.tolist(), running, counts, strict=True):
            assert row[:count] == one.block_ids[:count]
