"""Native sampling draws the tokens that torch's operators draw, alone or in a batch, on any number of threads."""

import ctypes
import functools
import itertools
import math
import threading
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.sampling import SamplingParams
from kernels.native.library import Library
from kernels.sampling import native, op, reference
from kernels.sampling.candidates import candidates
from kernels.sampling.logits import adjust_logits
from kernels.sampling.op import NoToken, sample_by_torch, sample_natively
from kernels.sampling.row import SamplingRow
from kernels.sampling.uniform import uniform
from tests.kernels.conftest import Probe

BASE = SamplingParams(seed=0, max_tokens=1000)
BORDER = 1e-12
"""So near to a border between two tokens the order in which numbers are added decides."""


def params(**changes: object) -> SamplingParams:
    return msgspec.structs.replace(BASE, **changes)


def random_logits(num_rows: int, vocab: int, *, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def plausible_logits(num_rows: int, vocab: int, *, seed: int = 0) -> torch.Tensor:
    """Like those of a language model: a bell with a few likely tokens far above it."""
    logits = random_logits(num_rows, vocab, seed=seed, scale=2.5)
    logits[:, : min(vocab, 200)] += torch.linspace(14, 0, 200)[:vocab]
    return logits[:, torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))].contiguous()


def drawn_nearby(logits: torch.Tensor, row: SamplingRow) -> set[int]:
    """Return the tokens that a row draws if its numbers are changed by `BORDER`."""
    controls = row.controls
    assert isinstance(controls, SamplingParams)
    (adjusted,) = adjust_logits(logits[None], [row])
    tokens = set()
    for top_p, min_p, move in itertools.product((1 - BORDER, 1.0, 1 + BORDER), (1 - BORDER, 1.0, 1 + BORDER), (-1, 1)):
        moved = msgspec.structs.replace(controls, top_p=controls.top_p * top_p, min_p=controls.min_p * min_p)
        pool = candidates(adjusted, moved if controls.top_p < 1.0 else msgspec.structs.replace(moved, top_p=1.0))
        shares = (pool.weights / pool.weights.sum()).cumsum(0)
        place = uniform(controls.seed, row.choice, row.position) + move * BORDER
        index = min(int(torch.searchsorted(shares, place, right=True)), len(shares) - 1)
        tokens.add(index if pool.ids is None else int(pool.ids[index]))
    return tokens


def assert_same(
    library: Library, logits: torch.Tensor, rows: Sequence[SamplingRow], expected: Sequence[int | NoToken]
) -> None:
    before = logits.clone()
    found = sample_natively(library, logits, rows)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            assert isinstance(theirs, int), (ours, theirs)
            assert rows[index].controls.temperature > 0.0, (ours, theirs)
            assert ours in drawn_nearby(logits[index], rows[index]), (ours, theirs, rows[index].controls)


@st.composite
def any_logits(draw: st.DrawFn) -> torch.Tensor:
    vocab = draw(st.sampled_from([1, 2, 17, 31, 32, 63, 64, 65, 333, 1000, 8000]))
    num_rows = draw(st.integers(1, 3))
    scale = draw(st.sampled_from([0.0, 0.1, 1.0, 10.0, 1e37]))
    logits = random_logits(num_rows, vocab, seed=draw(st.integers(0, 1000)), scale=scale)
    match draw(st.sampled_from(["plain", "tied", "impossible", "shifted", "few"])):
        case "tied":
            logits = logits.round()
        case "impossible":
            logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(vocab)) < 0.9] = -torch.inf
        case "shifted":
            logits += draw(st.sampled_from([-3e4, 1e3, 3e38]))
        case "few":
            logits[:] = -torch.inf
            logits[:, draw(st.integers(0, vocab - 1))] = 1.0
    if draw(st.integers(0, 9)) == 0:
        logits[0, draw(st.integers(0, vocab - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return logits


@st.composite
def any_row(draw: st.DrawFn, vocab: int) -> SamplingRow:
    ids = st.integers(0, vocab - 1)
    any_ids = st.one_of(ids, st.sampled_from([-1, -vocab, vocab, 2**31, -(2**40)]))
    controls = params(
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        temperature=draw(st.sampled_from([0.0, 1e-300, 1e-6, 0.2, 0.7, 1.0, 1.3, 5.0, 1e3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.99999999, 0.999, 0.9, 0.5, 1e-9, 0.0])),
        top_k=draw(st.sampled_from([-1, 0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 1, 2**31, 2**70])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.05, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        stop_ids=tuple(draw(st.lists(any_ids, max_size=3))),
        min_tokens=draw(st.sampled_from([0, 99])),
        logit_bias=tuple(draw(st.lists(st.tuples(any_ids, st.floats(-100, 100)), max_size=4))),
    )
    history = draw(st.lists(ids, min_size=1, max_size=12))
    words = draw(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=(vocab + 63) // 32))
    allowed = None if words is None else torch.tensor(words, dtype=torch.int32)
    num_prompt = draw(st.integers(0, len(history)))
    return SamplingRow(history, num_prompt, controls, draw(st.integers(0, 3)), allowed)


@settings(deadline=None)
@given(data=st.data())
def test_whatever_the_logits_and_demands_are(library: Library, data: st.DataObject) -> None:
    logits = data.draw(any_logits())
    num_rows, vocab = logits.shape
    rows = data.draw(st.lists(any_row(vocab), min_size=num_rows, max_size=num_rows))
    assert_same(library, logits, rows, sample_by_torch(logits, rows))


FILTERS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2, "top_p": 0.9},
    {"top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95},
    {"temperature": 1e3, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1e-6, "top_p": 0.5},
    {"top_p": 0.999999},
    {"top_k": 40},
    {"top_k": 767, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 2000},
    {"top_k": 40_000, "temperature": 3.0, "top_p": 0.99},
    {"min_p": 0.05},
    {"min_p": 1e-4, "temperature": 2.0},
]


KINDS = ("plausible", "random", "equal", "tied")


def logits_of_kind(kind: str) -> torch.Tensor:
    match kind:
        case "plausible":
            return plausible_logits(2, 49_152)
        case "random":
            return random_logits(2, 30_011)
        case "equal":
            return torch.full((2, 49_152), 2.5)
        case _:
            return (2 * random_logits(2, 30_011)).round()


def rows_of_filter(index: int) -> list[SamplingRow]:
    return [SamplingRow([1], 1, params(seed=seed, **FILTERS[index])) for seed in range(2)]


@functools.cache
def expected_tokens(kind: str, index: int) -> list[int | NoToken]:
    """Return what torch draws: some need 20 ms a row, and every instruction set is compared with it."""
    return sample_by_torch(logits_of_kind(kind), rows_of_filter(index))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(FILTERS)), ids=[str(changes) for changes in FILTERS])
def test_large_vocabularies(library: Library, index: int, kind: str) -> None:
    assert_same(library, logits_of_kind(kind), rows_of_filter(index), expected_tokens(kind, index))


def mixed_rows(num_rows: int, vocab: int) -> list[SamplingRow]:
    """Return rows of all filters, some with demands."""
    rows = []
    for index in range(num_rows):
        controls = params(seed=index, **FILTERS[index % len(FILTERS)])
        if index % 3 == 0:
            controls = msgspec.structs.replace(controls, frequency_penalty=0.5, logit_bias=((index, 3.0),))
        allowed = torch.full((vocab // 32,), 0x0F0F0F0F, dtype=torch.int32) if index % 5 == 0 else None
        rows.append(SamplingRow([index, 7, 7], 1, controls, allowed=allowed))
    return rows


def test_neighbours_and_threads_change_nothing(library: Library) -> None:
    vocab = 8000  # 64 rows are enough to be shared among threads
    logits = plausible_logits(64, vocab)
    rows = mixed_rows(64, vocab)
    alone = [sample_natively(library, logits[index : index + 1], [row], 1)[0] for index, row in enumerate(rows)]
    for num_threads in (1, 2, 3):
        assert sample_natively(library, logits, rows, num_threads) == alone
        assert sample_natively(library, logits.flip(0), rows[::-1], num_threads) == alone[::-1]
        scores = native.logprobs(library, logits, [5] * 64, 4, num_threads)
        for index in range(64):
            for together, single in zip(scores, native.logprobs(library, logits[index, None], [5], 4, 1), strict=True):
                assert torch.equal(together[index], single[0])


def test_several_threads_of_a_process_may_sample_at_once(library: Library) -> None:
    vocab = 8000
    logits = plausible_logits(64, vocab)
    rows = mixed_rows(64, vocab)
    expected = sample_natively(library, logits, rows, 1)
    found: list[list[int | NoToken]] = []
    threads = [
        threading.Thread(target=lambda: found.extend(sample_natively(library, logits, rows, 2) for _ in range(20)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(tokens == expected for tokens in found)


@pytest.mark.parametrize("vocab", [1, 17, 64, 1003])
def test_nothing_beside_a_row_is_read(library: Library, vocab: int) -> None:
    surroundings = torch.full((5, vocab + 80), torch.nan)
    logits = surroundings[1:4, 8 : 8 + vocab]
    logits[:] = random_logits(3, vocab)
    rows = mixed_rows(3, 0)
    found = sample_natively(library, logits, rows)
    assert found == sample_natively(library, logits.clone(), rows)
    assert NoToken.INVALID not in found


def test_rows_may_lie_in_memory_in_any_way(library: Library) -> None:
    logits = plausible_logits(1, 500).expand(4, -1)
    rows = mixed_rows(4, 500)
    expected = sample_natively(library, logits.clone(), rows)
    assert sample_natively(library, logits, rows) == expected
    assert sample_natively(library, logits.t().contiguous().t(), rows) == expected


def test_a_history_of_strange_ids_touches_nothing_else(library: Library) -> None:
    """Nobody sends one: what is outside the vocabulary is left out instead of written to."""
    penalised = params(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0)
    logits = torch.tensor([[1.0, 3.0, 2.5]])
    history = [2**40, -1, 3, 1, 2**62]
    assert sample_natively(library, logits, [SamplingRow(history, 2, penalised)]) == [2]


def test_the_power_is_exact_to_the_last_place(probe: Probe) -> None:
    functions = probe("sampling")
    generator = torch.Generator().manual_seed(0)
    spread = -700 * torch.rand(10_000, generator=generator, dtype=torch.float64)
    near = -torch.rand(10_000, generator=generator, dtype=torch.float64)
    ends = torch.tensor([0.0, -0.0, -1e-300, -5e-17, -700.0, -700.1, -torch.inf, -1e300], dtype=torch.float64)
    exponents = torch.cat((spread, near, ends))
    powers = torch.empty_like(exponents)
    functions.powers(
        *(ctypes.c_void_p(each.data_ptr()) for each in (exponents, powers)), ctypes.c_int64(len(exponents))
    )
    for exponent, power in zip(exponents.tolist(), powers.tolist(), strict=True):
        expected = math.exp(exponent) if exponent >= -700 else 0.0
        assert abs(power - expected) <= 1.5 * math.ulp(expected)  # that of the platform is wrong by half a unit
    assert powers[-8:-6].tolist() == [1.0, 1.0]


@settings(deadline=None)
@given(data=st.data())
def test_logits_change_to_the_last_bit_as_torch_changes_them(probe: Probe, data: st.DataObject) -> None:
    logits = data.draw(any_logits())[:1]
    vocab = logits.shape[1]
    row = data.draw(any_row(vocab))
    changed = torch.cat((logits, torch.zeros(1, -vocab % 32)), dim=1)
    counts = torch.zeros(vocab, dtype=torch.int32)
    packed = native.PackedRows([row], vocab)
    probe("sampling").adjusted(
        ctypes.c_void_p(changed.data_ptr()),
        ctypes.c_int64(vocab),
        ctypes.c_void_p(packed.address),
        ctypes.c_void_p(counts.data_ptr()),
    )
    expected = adjust_logits(logits, [row])
    assert torch.equal(changed[:, :vocab].isnan(), expected.isnan())
    assert torch.equal(changed[:, :vocab].nan_to_num(0.5), expected.nan_to_num(0.5))
    assert not counts.any()


@settings(deadline=None)
@given(data=st.data(), num_top=st.integers(0, 20))
def test_logprobs_are_those_of_the_reference(library: Library, data: st.DataObject, num_top: int) -> None:
    logits = data.draw(any_logits().filter(lambda logits: bool(logits.amax(dim=-1).isfinite().all())))
    num_rows, vocab = logits.shape
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=num_rows, max_size=num_rows))
    of_tokens, top_ids, of_top = native.logprobs(library, logits, tokens, min(num_top, vocab))
    for index, token in enumerate(tokens):
        expected, expected_top = reference.logprobs(logits[index], token, num_top)
        assert float(of_tokens[index]) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert top_ids[index].tolist() == [each for each, _ in expected_top]
        assert of_top[index].tolist() == pytest.approx([number for _, number in expected_top], rel=1e-12, abs=1e-12)


def test_bad_logits_have_no_logprobs(library: Library) -> None:
    logits = random_logits(2, 100)
    logits[1, 3] = torch.nan
    of_tokens, _, of_top = native.logprobs(library, logits, [1, 1], 20)
    assert of_tokens.isnan().tolist() == [False, True]
    assert bool(of_top[1].isnan().all())


class TestChoice:
    """Which implementation serves a call."""

    LOGITS = torch.zeros(1, 5)
    ROWS = (SamplingRow([1], 1, params(temperature=0.0)),)

    def test_the_native_one_where_it_is_built(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op, "native_library", lambda: library)
        monkeypatch.setattr(op, "sample_by_torch", None)
        assert op.sample(self.LOGITS, self.ROWS) == [0]

    def test_torch_where_it_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op, "native_library", lambda: None)
        assert op.sample(self.LOGITS, self.ROWS) == [0]
