"""Hugging Face directories against `transformers`: the same files give the same numbers; no doubtful file is read."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.import_utils import is_kernels_available

from common.errors import ModelUnusable
from common.model.checkpoint import open_checkpoint
from common.model.config import RopeConfig
from common.model.llama3_rope import llama3_divisors
from tests.support.reference_weights import EMBEDDING, HEAD, assert_same_weights, reference_weights
from tests.support.tiny_models import edit_json, read_json, write_tiny_llama, write_weights

pytestmark = pytest.mark.golden

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class TestHuggingFaceDirectory:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"tie": False, "shards": 3},
            {"attention_bias": True, "mlp_bias": True, "tie": False},
            {
                "head_dim": 24,
                "hidden": 96,
                "heads": 6,
                "kv_heads": 3,
                "rope_scaling": LLAMA3_SCALING,
                "max_position": 16384,
            },
        ],
        ids=["tied", "sharded", "biases", "wide-heads"],
    )
    def test_weights_equal_transformers(self, tmp_path: Path, options: dict[str, Any]) -> None:
        path = write_tiny_llama(tmp_path / "tiny", **options)
        assert_same_weights(open_checkpoint(path), reference_weights(path))

    def test_geometry_is_the_files(self, tmp_path: Path) -> None:
        path = write_tiny_llama(
            tmp_path / "tiny", num_layers=3, hidden=96, heads=6, kv_heads=2, vocab=300, max_position=512, tie=False
        )
        config = open_checkpoint(path).config
        assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (3, 96, 6, 2)
        assert (config.head_dim, config.vocab_size, config.max_context) == (16, 300, 512)
        assert config.rms_norm_eps == pytest.approx(1e-5)
        assert not config.tie_embeddings

    def test_stored_numbers_are_mapped_not_copied(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_tiny_llama(tmp_path / "tiny"))
        first, second = (checkpoint.tensor(EMBEDDING, torch.float32) for _ in range(2))
        assert first.data_ptr() == second.data_ptr()

    def test_other_dtype_is_converted(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        expected = reference_weights(path)[EMBEDDING].to(torch.bfloat16)
        assert torch.equal(open_checkpoint(path).tensor(EMBEDDING, torch.bfloat16), expected)

    def test_transformers_loads_beside_our_kernels_package(self, tmp_path: Path) -> None:
        spec = importlib.util.find_spec("kernels")
        assert spec is not None
        assert spec.origin is not None
        ours = Path(__file__).parents[2] / "kernels" / "__init__.py"
        assert Path(spec.origin) == ours
        assert ours.read_text() == ""
        assert not is_kernels_available()
        model = AutoModelForCausalLM.from_pretrained(write_tiny_llama(tmp_path / "tiny"))
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


class TestTiedHead:
    """B090, B091."""

    def test_tied_without_head(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", tie=True)
        checkpoint = open_checkpoint(path)
        assert checkpoint.config.tie_embeddings
        assert_same_weights(checkpoint, reference_weights(path))

    @pytest.mark.parametrize("tie", [False, None], ids=["false", "family-default"])
    def test_untied_without_head_is_refused(self, tmp_path: Path, tie: bool | None) -> None:
        path = write_tiny_llama(tmp_path / "tiny", tie=True)
        edit_json(path / "config.json", tie_word_embeddings=tie)
        with pytest.raises(ModelUnusable, match=r"missing lm_head\.weight"):
            open_checkpoint(path)

    def test_tied_with_repeated_head(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write_tiny_llama(tmp_path / "tiny", tie=True)
        weights = load_file(path / "model.safetensors")
        write_weights(path, {**weights, HEAD: weights[EMBEDDING].clone()})
        checkpoint = open_checkpoint(path)
        assert checkpoint.config.tie_embeddings
        assert HEAD not in checkpoint.names()
        assert_same_weights(checkpoint, reference_weights(path))
        assert not caplog.records

    def test_tied_with_another_head_uses_it_as_transformers_does(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_tiny_llama(tmp_path / "tiny", tie=False)
        edit_json(path / "config.json", tie_word_embeddings=True)
        with caplog.at_level(logging.WARNING, logger="common.model"):
            checkpoint = open_checkpoint(path)
        assert not checkpoint.config.tie_embeddings
        assert_same_weights(checkpoint, reference_weights(path))
        assert HEAD in caplog.text

    def test_text_config_decides(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", tie=False)
        expected = reference_weights(path)
        nested = {"model_type": "llama", "tie_word_embeddings": False}
        edit_json(path / "config.json", tie_word_embeddings=True, text_config=nested)
        assert_same_weights(open_checkpoint(path), expected)
        edit_json(path / "config.json", tie_word_embeddings=False, text_config={**nested, "tie_word_embeddings": True})
        weights = load_file(path / "model.safetensors")
        del weights[HEAD]
        write_weights(path, weights)
        assert open_checkpoint(path).config.tie_embeddings


class TestIndex:
    """B093."""

    def test_strays_are_logged_and_never_read(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write_tiny_llama(tmp_path / "tiny", shards=2)
        expected = reference_weights(path)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        save_file(zeros, path / "model.safetensors")
        save_file(zeros, path / "consolidated.safetensors")
        second = path / "model-00002-of-00002.safetensors"
        layer = {name: tensor for name, tensor in zeros.items() if name.startswith("model.layers.0.")}
        save_file({**layer, **load_file(second)}, second)
        with caplog.at_level(logging.WARNING, logger="common.model"):
            checkpoint = open_checkpoint(path)
        assert_same_weights(checkpoint, expected)
        assert "consolidated.safetensors, model.safetensors" in caplog.text
        assert "model-00002-of-00002.safetensors: ignoring" in caplog.text

    def test_promised_tensor_not_in_its_shard(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", shards=2)
        index = path / "model.safetensors.index.json"
        weight_map = read_json(index)["weight_map"]
        weight_map["model.norm.weight"] = weight_map[EMBEDDING]
        edit_json(index, weight_map=weight_map)
        with pytest.raises(ModelUnusable, match=r"promises model\.norm\.weight"):
            open_checkpoint(path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", shards=2)
        (path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelUnusable, match="model-00002-of-00002"):
            open_checkpoint(path)

    @pytest.mark.parametrize("file", ["../tiny/model-00001-of-00002.safetensors", 7], ids=["outside", "number"])
    def test_shard_outside_the_directory(self, tmp_path: Path, file: object) -> None:
        path = write_tiny_llama(tmp_path / "tiny", shards=2)
        index = path / "model.safetensors.index.json"
        edit_json(index, weight_map={**read_json(index)["weight_map"], EMBEDDING: file})
        with pytest.raises(ModelUnusable, match="not to a file beside it"):
            open_checkpoint(path)


class TestRefusals:
    @pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
    def test_rope_kind(self, tmp_path: Path, kind: str) -> None:
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 512}
        if kind == "longrope":
            scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        path = write_tiny_llama(tmp_path / "tiny", rope_scaling=scaling)
        with pytest.raises(ModelUnusable, match=f"rope type {kind} is not supported"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Qwen2ForCausalLM .* LlamaForCausalLM"),
            ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "LlamaForCausalLM"),
            ({"model_type": None}, "model type unnamed"),
            ({"hidden_act": "gelu"}, "gelu"),
            ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
            ({"num_hidden_layers": "two"}, r"config\.json"),
            ({"rope_scaling": {"rope_type": "linear"}}, r"config\.json"),
        ],
        ids=["qwen", "composite", "no-type", "activation", "quantised", "mistyped", "half-rope"],
    )
    def test_config(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        edit_json(path / "config.json", **changes)
        with pytest.raises(ModelUnusable, match=message) as refusal:
            open_checkpoint(path)
        assert "\n" not in str(refusal.value)

    def test_tensors_are_all_accounted_for(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        weights = load_file(path / "model.safetensors")
        lost = {name: tensor for name, tensor in weights.items() if ".mlp.up_proj." not in name}
        for changed, message in (
            (lost, r"missing model\.layers\.0\.mlp\.up_proj\.weight, model\.layers\.1"),
            ({**weights, "model.extra.weight": torch.zeros(3)}, r"no place for model\.extra\.weight"),
            ({**weights, "model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \[3\], expected \[64\]"),
            ({**weights, "model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "stored as I8"),
        ):
            write_weights(path, changed)
            with pytest.raises(ModelUnusable, match=message):
                open_checkpoint(path)

    def test_derived_buffers_of_old_checkpoints_are_ignored(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        weights = load_file(path / "model.safetensors")
        write_weights(path, {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
        assert open_checkpoint(path).names() == weights.keys()

    def test_damaged_files(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        whole = (path / "model.safetensors").read_bytes()
        for damaged in (b"", whole[:6], whole[: len(whole) // 2], b"\xff" * 64):
            (path / "model.safetensors").write_bytes(damaged)
            with pytest.raises(ModelUnusable, match=r"model\.safetensors: cannot be read"):
                open_checkpoint(path)
        (path / "model.safetensors").unlink()
        with pytest.raises(ModelUnusable, match="holds neither"):
            open_checkpoint(path)
        (path / "config.json").write_text("{")
        with pytest.raises(ModelUnusable, match=r"config\.json: cannot be read"):
            open_checkpoint(path)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelUnusable, match="no such file"):
            open_checkpoint(tmp_path / "absent")


class TestRope:
    def test_kinds(self, tmp_path: Path) -> None:
        plain = write_tiny_llama(tmp_path / "plain", rope_theta=5e5)
        linear = write_tiny_llama(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 4.0})
        llama3 = write_tiny_llama(tmp_path / "llama3", rope_scaling=LLAMA3_SCALING, max_position=16384)
        assert open_checkpoint(plain).config.rope == RopeConfig(5e5)
        assert open_checkpoint(linear).config.rope == RopeConfig(1e4, "linear", 4.0)
        assert open_checkpoint(llama3).config.rope == RopeConfig(1e4, "llama3", 32.0, 1.0, 4.0, 8192)

    def test_new_style_parameters(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", max_position=16384)
        edit_json(
            path / "config.json",
            rope_theta=None,
            rope_scaling=None,
            rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5},
        )
        assert open_checkpoint(path).config.rope == RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)

    def test_llama3_divisors_equal_transformers(self) -> None:
        config = LlamaConfig(
            head_dim=128, max_position_embeddings=131072, rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5}
        )
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        divisors = llama3_divisors(RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192), 64)
        plain = 5e5 ** -(torch.arange(64, dtype=torch.float64) / 64)
        torch.testing.assert_close(
            plain / torch.tensor(divisors, dtype=torch.float64), stretched.double(), rtol=1e-5, atol=0
        )


class TestModelHash:
    def test_differs_with_the_weights(self, tmp_path: Path) -> None:
        first = write_tiny_llama(tmp_path / "first", shards=2)
        same = write_tiny_llama(tmp_path / "same", shards=2)
        other = write_tiny_llama(tmp_path / "other", shards=2, seed=1)
        hashes = [open_checkpoint(path).model_hash() for path in (first, same, other)]
        assert hashes[0] == hashes[1]
        assert hashes[0] != hashes[2]
