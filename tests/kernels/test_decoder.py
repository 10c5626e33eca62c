"""The native decoder equals the torch model, and gives a row the same bits whoever is computed with it."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from common.model.batch import ForwardBatch
from common.model.config import ModelConfig, RopeConfig
from common.model.llama import LlamaModel
from common.model.llama_weights import LayerWeights, LlamaWeights, Projection
from common.model.rope import RotaryEmbedding
from kernels.decoder.op import NativeDecoder
from kernels.decoder.parameters import DecoderLayer, DecoderShape, DecoderWeights
from kernels.linear.packing import pack_linear
from kernels.native.library import Library

BLOCK_SIZE = 16
PLAIN = ModelConfig(
    architecture="llama",
    num_layers=3,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=176,
    vocab_size=211,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    max_context=4096,
    tie_embeddings=False,
)
CONFIGS = {
    "plain": PLAIN,
    "biases": replace(PLAIN, attention_bias=True, mlp_bias=True),
    "tied": replace(PLAIN, tie_embeddings=True),
    "one head per group": replace(PLAIN, num_heads=2, head_dim=64),
    "eight heads per group": replace(PLAIN, num_heads=8, num_kv_heads=1, head_dim=128),
    "odd sizes": replace(PLAIN, hidden_size=70, num_heads=3, num_kv_heads=1, head_dim=80, intermediate_size=45),
    "one layer": replace(PLAIN, num_layers=1),
}


def _weights(config: ModelConfig, dtype: torch.dtype) -> LlamaWeights:
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    def projection(num_out: int, num_in: int, *, has_bias: bool) -> Projection:
        return Projection(numbers(num_out, num_in, scale=num_in**-0.5), numbers(num_out) if has_bias else None)

    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    embedding = numbers(config.vocab_size, hidden)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                attention_norm=numbers(hidden),
                qkv=projection(qkv, hidden, has_bias=config.attention_bias),
                output=projection(hidden, attended, has_bias=config.attention_bias),
                mlp_norm=numbers(hidden),
                gate_up=projection(2 * config.intermediate_size, hidden, has_bias=config.mlp_bias),
                down=projection(hidden, config.intermediate_size, has_bias=config.mlp_bias),
            )
            for _ in range(config.num_layers)
        ),
        norm=numbers(hidden),
        head=embedding if config.tie_embeddings else numbers(config.vocab_size, hidden, scale=hidden**-0.5),
    )


def _packed(weights: LlamaWeights) -> DecoderWeights:
    return DecoderWeights(
        embedding=None if weights.head is weights.embedding else weights.embedding,
        layers=tuple(
            DecoderLayer(
                attention_norm=layer.attention_norm,
                qkv=pack_linear(layer.qkv.weight, layer.qkv.bias),
                output=pack_linear(layer.output.weight, layer.output.bias),
                mlp_norm=layer.mlp_norm,
                gate_up=pack_linear(layer.gate_up.weight, layer.gate_up.bias, is_gated=True),
                down=pack_linear(layer.down.weight, layer.down.bias),
            )
            for layer in weights.layers
        ),
        norm=weights.norm,
        head=pack_linear(weights.head),
    )


@dataclass
class Model:
    """Both models with pages of their own, whose slots hold NaN until they are written."""

    config: ModelConfig
    dtype: torch.dtype
    library: Library
    num_threads: int = 1
    contexts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        weights = _weights(self.config, self.dtype)
        config = self.config
        shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        self.native = NativeDecoder(shape, _packed(weights), self.num_threads, self.library)
        self.torch = LlamaModel(config, weights)
        self.rope = RotaryEmbedding(config.rope, config.head_dim, torch.device("cpu"))
        pages = (64, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.pages = torch.full(pages, torch.nan, dtype=self.dtype)
        self.torch_pages = self.pages.clone()

    def batch(self, chunks: Sequence[tuple[int, int]], wanted: Sequence[int] | None = None) -> ForwardBatch:
        """Return the next `length` tokens of each (sequence, length); a sequence has 8 blocks, in a strange order."""
        positions, slots, ids, tables, lengths, contexts = [], [], [], [], [], []
        for sequence, length in chunks:
            start = self.contexts.get(sequence, 0)
            table = [63 - sequence - 8 * block for block in range(8)]
            for position in range(start, start + length):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
                ids.append((sequence * 131 + position * 17) % self.config.vocab_size)
            self.contexts[sequence] = start + length
            tables.append(table)
            lengths.append(length)
            contexts.append(start + length)
        rows = list(range(len(ids))) if wanted is None else wanted
        return ForwardBatch(
            token_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slots=torch.tensor(slots, dtype=torch.int64),
            wanted=torch.tensor(rows, dtype=torch.int64),
            block_tables=torch.tensor(tables, dtype=torch.int64).view(-1, 8),
            query_lengths=lengths,
            context_lengths=contexts,
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        cos, sin = self.rope.angles(batch.positions)
        return self.native.forward(
            batch.token_ids,
            cos,
            sin,
            batch.slots,
            batch.wanted,
            batch.block_tables,
            batch.query_lengths,
            batch.context_lengths,
            self.pages,
        )


MakeModel = Callable[..., Model]


@pytest.fixture
def make(library: Library) -> Iterator[MakeModel]:
    models = []

    def build(config: ModelConfig, dtype: torch.dtype = torch.float32, num_threads: int = 1) -> Model:
        models.append(Model(config, dtype, library, num_threads))
        return models[-1]

    yield build
    for model in models:
        model.native.close()


STEPS = [
    [(0, 5), (1, 1), (2, 37)],
    [(0, 1), (1, 1), (2, 1)],
    [(3, 70), (0, 1), (2, 12), (1, 1)],
    [(1, 20)],
]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_torch_model(name: str, num_threads: int, make: MakeModel) -> None:
    model = make(CONFIGS[name], num_threads=num_threads)
    for chunks in STEPS:
        batch = model.batch(chunks)
        hidden, expected = model.forward(batch), model.torch.forward(batch, model.torch_pages)
        torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.native.head(hidden), model.torch.head(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.pages, model.torch_pages, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_no_further_from_fp32_than_torch_s(name: str, make: MakeModel) -> None:
    model = make(CONFIGS[name], torch.bfloat16)
    exact = LlamaModel(model.config, _to_float(_weights(model.config, torch.bfloat16)))
    exact_pages = torch.zeros_like(model.pages, dtype=torch.float32)
    for chunks in STEPS:
        batch = model.batch(chunks)
        expected = exact.forward(batch, exact_pages)
        error = (model.forward(batch).float() - expected).square().mean().sqrt()
        torch_error = (model.torch.forward(batch, model.torch_pages).float() - expected).square().mean().sqrt()
        assert error <= 1.1 * torch_error
        assert error <= 0.03 * expected.square().mean().sqrt()


def _to_float(weights: LlamaWeights) -> LlamaWeights:
    def widened(projection: Projection) -> Projection:
        return Projection(projection.weight.float(), None if projection.bias is None else projection.bias.float())

    embedding = weights.embedding.float()
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                layer.attention_norm.float(),
                widened(layer.qkv),
                widened(layer.output),
                layer.mlp_norm.float(),
                widened(layer.gate_up),
                widened(layer.down),
            )
            for layer in weights.layers
        ),
        norm=weights.norm.float(),
        head=embedding if weights.head is weights.embedding else weights.head.float(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch_chunking_and_team(dtype: torch.dtype, make: MakeModel) -> None:
    whole = make(CONFIGS["biases"], dtype, num_threads=2)
    lengths = {0: 41, 1: 3, 2: 97}
    rows = torch.split(whole.forward(whole.batch(list(lengths.items()))), list(lengths.values()))
    for sequence, length in lengths.items():
        for chunk in (1, 7, 16, length):
            alone = make(CONFIGS["biases"], dtype, num_threads=1)
            parts = [
                alone.forward(alone.batch([(sequence, min(chunk, length - start))]))
                for start in range(0, length, chunk)
            ]
            assert torch.equal(torch.cat(parts), rows[sequence]), (sequence, chunk)
            assert torch.equal(alone.native.head(parts[0]), whole.native.head(rows[sequence])[: min(chunk, length)])
            blocks = [63 - sequence - 8 * block for block in range(length // BLOCK_SIZE)]
            assert torch.equal(alone.pages[blocks], whole.pages[blocks])


@pytest.mark.parametrize("wanted", [[], [0], [43, 2], [7, 7, 7], list(reversed(range(44)))])
def test_wanted_rows_come_in_the_order_asked(wanted: list[int], make: MakeModel) -> None:
    chunks = [(0, 40), (1, 4)]
    all_rows = (whole := make(PLAIN)).forward(whole.batch(chunks))
    model = make(PLAIN, num_threads=2)
    assert torch.equal(model.forward(model.batch(chunks, wanted)), all_rows[wanted])
    assert torch.equal(model.pages.isnan(), whole.pages.isnan())
    assert torch.equal(model.pages.nan_to_num(), whole.pages.nan_to_num())


def test_an_empty_step_does_nothing(make: MakeModel) -> None:
    model = make(PLAIN, num_threads=2)
    assert model.forward(model.batch([])).shape == (0, PLAIN.hidden_size)
    assert bool(model.pages.isnan().all())
    assert model.native.head(torch.empty(0, PLAIN.hidden_size)).shape == (0, PLAIN.vocab_size)


def test_only_the_batch_s_slots_are_written(make: MakeModel) -> None:
    model = make(PLAIN)
    batch = model.batch([(0, 18), (5, 1)])
    model.forward(batch)
    by_slot = model.pages.permute(0, 4, 1, 2, 3, 5).flatten(0, 1)  # [num_slots, ...]
    is_written = torch.zeros(len(by_slot), dtype=torch.bool)
    is_written[batch.slots] = True
    assert bool(by_slot[is_written].isfinite().all())
    assert bool(by_slot[~is_written].isnan().all())


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("token id", lambda batch: batch.token_ids.fill_(PLAIN.vocab_size)),
        ("token id", lambda batch: batch.token_ids.fill_(-1)),
        ("slot", lambda batch: batch.slots.fill_(64 * BLOCK_SIZE)),
        ("wanted", lambda batch: batch.wanted.fill_(2)),
        ("lengths", lambda batch: batch.query_lengths.__setitem__(0, 1)),
        ("lengths", lambda batch: batch.context_lengths.__setitem__(0, 8 * BLOCK_SIZE + 1)),
        ("lengths", lambda batch: batch.context_lengths.__setitem__(0, 1)),
        ("block", lambda batch: batch.block_tables.fill_(64)),
        ("block", lambda batch: batch.block_tables.fill_(-1)),
    ],
)
def test_numbers_that_name_nothing_are_refused(
    what: str, spoil: Callable[[ForwardBatch], object], make: MakeModel
) -> None:
    model = make(PLAIN)
    batch = model.batch([(0, 2)])
    spoil(batch)
    with pytest.raises(IndexError, match=what):
        model.forward(batch)
    assert bool(model.pages.isnan().all())


def test_weights_that_do_not_fit_are_refused(library: Library) -> None:
    weights = _packed(_weights(PLAIN, torch.float32))
    shape = DecoderShape(PLAIN.num_heads, PLAIN.num_kv_heads, PLAIN.head_dim, PLAIN.rms_norm_eps)
    layer = weights.layers[0]
    for wrong in (
        replace(layer, gate_up=layer.down),
        replace(layer, gate_up=replace(layer.gate_up, is_gated=False)),
        replace(layer, output=layer.qkv),
        replace(layer, mlp_norm=layer.mlp_norm[1:]),
        replace(layer, attention_norm=layer.attention_norm.bfloat16()),
    ):
        with pytest.raises(AssertionError):
            NativeDecoder(shape, replace(weights, layers=(layer, wrong)), 1, library)
    for wrong_shape in (replace(shape, num_heads=3), replace(shape, head_dim=64), replace(shape, num_kv_heads=4)):
        with pytest.raises(AssertionError):
            NativeDecoder(wrong_shape, weights, 1, library)


def test_steps_of_any_size_follow_each_other(make: MakeModel) -> None:
    """Memory that has grown for one step is used again by smaller and larger ones."""
    model, other = make(PLAIN, num_threads=4), make(PLAIN)
    sizes = itertools.cycle([1, 50, 2, 9, 1, 1, 30])
    for sequence in itertools.islice(itertools.cycle(range(4)), 20):
        chunk = [(sequence, min(next(sizes), 128 - model.contexts.get(sequence, 0)))]
        if chunk[0][1]:
            assert torch.equal(model.forward(model.batch(chunk)), other.forward(other.batch(chunk)))
