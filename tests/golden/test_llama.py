"""Model, runner and sampling give what `transformers` gives, however the work is cut and batched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ModelUnusable
from common.messages.sampling import SamplingParams
from common.model.checkpoint import Checkpoint, open_checkpoint
from common.model.locate import locate_model
from common.runtime.runner import ModelRunner, allocate_pages
from common.scheduling.plan import StepPlan
from tests.support import model_paths
from tests.support.model_driver import ModelDriver
from tests.support.model_paths import AnyLlama, ModelPath
from tests.support.reference import bundled_model
from tests.support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.golden

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie": True},
    "untied": {"tie": False},
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3-rope": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True, "tie": False},
    "one-kv-head": {"heads": 6, "kv_heads": 1, "hidden": 96},
    "wide-heads": {"head_dim": 24},
}
PROMPT_LENGTHS = (1, 15, 16, 17, 100)


@pytest.fixture(scope="module", params=model_paths.ALL, ids=str)
def way(request: pytest.FixtureRequest) -> ModelPath:
    """Each way to compute a model in turn."""
    selected: ModelPath = request.param
    return selected


def their_logits(path: Path, ids: list[int]) -> torch.Tensor:
    """Return logits [num_tokens, vocab] of `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def our_logits(model: AnyLlama, ids: list[int], **cut: int) -> torch.Tensor:
    """Return the logits after the last of `ids`, computed in chunks."""
    driver = ModelDriver(model, **cut)
    sequence = driver.add(ids)
    while sequence.num_generated == 0:
        assert not driver.step([sequence])
    return driver.probe.logits[0]


def random_ids(length: int, seed: int = 0, vocab: int = 320) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), tie=False, seed=3)


@pytest.fixture(scope="module")
def model(tiny: Path, way: ModelPath) -> AnyLlama:
    return way.load(open_checkpoint(tiny))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_position(tmp_path: Path, variant: str, way: ModelPath) -> None:
    path = write_tiny_llama(tmp_path, **VARIANTS[variant])
    ids = random_ids(150)
    expected = their_logits(path, ids)
    # One token at a time gives logits at every position and decodes through the whole context.
    driver = ModelDriver(way.load(open_checkpoint(path)), chunk_size=1)
    sequence = driver.add(ids[:1])
    for position, token in enumerate(ids):
        sequence.token_ids[position:] = [token]
        assert not driver.step([sequence])
        torch.testing.assert_close(driver.probe.logits[0], expected[position], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 512])
def test_any_chunking_gives_the_same_logits(model: AnyLlama, tiny: Path, chunk_size: int, block_size: int) -> None:
    ids = random_ids(100)
    logits = our_logits(model, ids, chunk_size=chunk_size, block_size=block_size)
    torch.testing.assert_close(logits, their_logits(tiny, ids)[-1], rtol=1e-4, atol=1e-4)


def test_paged_equals_full_recompute(model: AnyLlama) -> None:
    driver = ModelDriver(model)
    sequence = driver.add(random_ids(20))
    for _ in range(15):
        driver.step([sequence])
        recomputed = our_logits(model, sequence.token_ids[:-1])
        torch.testing.assert_close(driver.probe.logits[0], recomputed, rtol=1e-4, atol=1e-4)


def test_greedy_equals_generate(model: AnyLlama, tiny: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    driver = ModelDriver(model)
    generated = driver.generate([driver.add(prompt) for prompt in prompts], 24)
    for prompt, ours in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        output = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert ours == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chunk_size", [7, 512])
def test_batch_and_preemption_change_no_token(model: AnyLlama, chunk_size: int) -> None:
    """B067 and B068, greedy and seeded."""
    prompts = [random_ids(length, seed=length) for length in PROMPT_LENGTHS]
    sampling = [
        SamplingParams(seed=0, max_tokens=99, temperature=0.0),
        SamplingParams(seed=42, max_tokens=99, temperature=0.8),
        SamplingParams(seed=42, max_tokens=99, temperature=0.8, top_p=0.9, top_k=50),
        SamplingParams(seed=-5, max_tokens=99, temperature=1.2, min_p=0.05),
        SamplingParams(seed=1, max_tokens=99, repetition_penalty=1.3, frequency_penalty=0.4),
    ]
    alone = []
    for prompt, params in zip(prompts, sampling, strict=True):
        solo = ModelDriver(model)
        alone += solo.generate([solo.add(prompt, params)], 16)
    driver = ModelDriver(model, chunk_size=chunk_size)
    sequences = [driver.add(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    driver.generate(sequences, 5)
    for sequence in sequences[::2]:
        driver.preempt(sequence)
    assert driver.generate(sequences, 16) == alone


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_invalid_logits_are_reported_and_neighbours_unchanged(model: AnyLlama, value: float) -> None:
    """B078: one of three sequences goes bad at its second token."""

    def run(poison: dict[int, float]) -> tuple[list[list[int]], list[str]]:
        driver = ModelDriver(model)
        sequences = [driver.add(random_ids(10 + index)) for index in range(3)]
        driver.step(sequences)
        # Rows are ordered by context, longest first; the middle one stays in the middle.
        driver.probe.replacements = poison
        invalid = driver.step(sequences)
        driver.probe.replacements = {}
        healthy = [sequence for sequence in sequences if sequence.key not in invalid]
        return driver.generate(healthy, 8), [key.request for key in invalid]

    (first, _, third), none = run({})
    assert none == []
    assert run({1: value}) == ([first, third], ["request-2"])


def test_bf16_follows_fp32(tiny: Path, model: AnyLlama, way: ModelPath) -> None:
    ids = random_ids(100)
    exact = our_logits(model, ids)
    rounded = our_logits(way.load(open_checkpoint(tiny), torch.bfloat16), ids, chunk_size=7)
    assert rounded.dtype == torch.float32
    assert float((rounded - exact).norm() / exact.norm()) < 0.03


def test_pages_over_a_buffer(model: AnyLlama) -> None:
    layout = model.layout(8)
    buffer = bytearray(layout.page_bytes * 20)
    pages = allocate_pages(layout, 20, memoryview(buffer))
    assert pages.shape == (20, layout.num_layers, 2, layout.num_kv_heads, 8, layout.head_dim)
    driver = ModelDriver(model, block_size=8, num_blocks=20)
    expected = driver.generate([driver.add(random_ids(30))], 8)
    driver.runner = ModelRunner(model, pages, 8)
    sequence = driver.add(random_ids(30))
    driver.free = list(range(20))
    assert driver.generate([sequence], 8) == expected
    # One page is one contiguous span of the buffer.
    block = sequence.block_ids[0]
    page = bytes(buffer[block * layout.page_bytes : (block + 1) * layout.page_bytes])
    assert page == pages[block].numpy().tobytes()
    assert any(page)


def test_an_empty_plan_runs_nothing(model: AnyLlama) -> None:
    result = ModelDriver(model).runner.run(StepPlan())
    assert result.tokens == {}
    assert result.invalid == frozenset()


class EditedCheckpoint:
    """A checkpoint whose names or tensors were tampered with."""

    def __init__(self, checkpoint: Checkpoint, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
        self.config = checkpoint.config
        self._tensors = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
        edit(self._tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors[name].to(dtype)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing tensor lm_head.weight"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "no place for model.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight has shape"),
    ],
)
def test_every_tensor_is_accounted_for(
    tiny: Path, edit: Callable[[dict[str, torch.Tensor]], object], message: str, way: ModelPath
) -> None:
    checkpoint: Any = EditedCheckpoint(open_checkpoint(tiny), edit)
    with pytest.raises(ModelUnusable, match=message):
        way.load(checkpoint)


def test_progress_rises_from_nothing_to_all(tiny: Path, way: ModelPath) -> None:
    fractions: list[float] = []
    way.load(open_checkpoint(tiny), torch.float32, fractions.append)
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)


@pytest.mark.parametrize("way", model_paths.FASTEST, ids=str)
def test_bundled_model_equals_transformers(way: ModelPath) -> None:
    """The real geometry, with the same dequantised weights on both sides."""
    checkpoint = open_checkpoint(locate_model("smollm2"))
    theirs = bundled_model()
    driver = ModelDriver(way.load(checkpoint), num_blocks=32)
    prompts = [[504, 1276, 282, 4649, 314], [19556], list(range(1000, 1033))]
    generated = driver.generate([driver.add(prompt) for prompt in prompts], 6)
    for prompt, ours in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        output = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, eos_token_id=None)
        assert ours == output[0, len(prompt) :].tolist()
