"""GGUF files against `transformers` and the directories they were converted from; no doubtful file is read."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from common.errors import ModelUnusable
from common.model.checkpoint import open_checkpoint
from common.model.config import RopeConfig
from common.model.gguf_header import read_header
from common.model.gguf_names import canonical_name
from common.model.llama3_rope import llama3_divisors
from common.model.locate import locate_model
from tests.support.reference_weights import assert_same_weights, reference_weights
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.golden


class TestGguf:
    def test_bundled_weights_equal_transformers(self) -> None:
        """A sample with every kind of tensor: reading the whole file the slow way takes 25 s on a busy machine."""
        path = locate_model("smollm2")
        checkpoint = open_checkpoint(path)
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
        untyped: Any = LlamaTensorProcessor
        process = untyped(heads).process
        sample = [
            tensor
            for tensor in GGUFReader(path).tensors
            if re.match(r"blk\.(0|29)\.|output_norm|token_embd", tensor.name)
        ]
        assert len(sample) == 2 + 2 * 9
        for tensor in sample:
            values = process(quants.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
            name = canonical_name(tensor.name)
            assert name is not None
            assert torch.equal(checkpoint.tensor(name, torch.float32), torch.tensor(values)), name

    def test_names_and_order_equal_transformers(self, tmp_path: Path) -> None:
        source = write_tiny_llama(tmp_path / "tiny", heads=8)
        path = write_tiny_gguf(tmp_path / "tiny.gguf", source, kind=GGMLQuantizationType.Q8_0)
        model = AutoModelForCausalLM.from_pretrained(source)
        load: Any = load_gguf_checkpoint  # untyped
        assert_same_weights(open_checkpoint(path), load(str(path), return_tensors=True, model_to_load=model)["tensors"])

    @pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
    def test_conversion_is_undone(self, tmp_path: Path, biases: bool) -> None:
        source = write_tiny_llama(
            tmp_path / "tiny", head_dim=24, kv_heads=1, attention_bias=biases, mlp_bias=biases, tie=not biases
        )
        original, converted = open_checkpoint(source), open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf", source))
        assert converted.config.architecture == "llama"
        assert replace(converted.config, architecture="LlamaForCausalLM", rms_norm_eps=1e-5) == original.config
        assert converted.names() == original.names()
        for name in original.names():
            assert torch.equal(converted.tensor(name, torch.float32), original.tensor(name, torch.float32)), name

    @pytest.mark.parametrize(
        "kind", [GGMLQuantizationType[name] for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
    )
    def test_quantised_rows_keep_their_places(self, tmp_path: Path, kind: GGMLQuantizationType) -> None:
        source = write_tiny_llama(tmp_path / "tiny")
        converted = open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf", source, kind=kind))
        for name, tensor in reference_weights(source).items():
            values = tensor.numpy()
            expected = quants.dequantize(quants.quantize(values, kind), kind) if values.ndim == 2 else values
            assert torch.equal(converted.tensor(name, torch.float32), torch.from_numpy(expected)), name

    def test_header_equals_the_reference_reader(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_llama(tmp_path / "tiny"))
        header, reader = read_header(memoryview(path.read_bytes())), GGUFReader(path)
        expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert header.values == expected
        assert [(entry.name, entry.offset, entry.num_bytes) for entry in header.tensors] == [
            (tensor.name, tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors
        ]

    def test_llama3_rope_is_recovered_from_its_factors(self, tmp_path: Path) -> None:
        source = write_tiny_llama(tmp_path / "tiny", rope_theta=5e5, max_position=131072)
        rope = RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
        path = write_tiny_gguf(tmp_path / "tiny.gguf", source, rope_factors=llama3_divisors(rope, 8))
        checkpoint = open_checkpoint(path)
        assert checkpoint.config.rope == rope
        assert "rope_freqs.weight" not in checkpoint.names()

    def test_other_rope_factors_are_refused(self, tmp_path: Path) -> None:
        source = write_tiny_llama(tmp_path / "tiny")
        path = write_tiny_gguf(tmp_path / "tiny.gguf", source, rope_factors=[1.0, 1.1, 1.2, 1.3, 2.0, 3.0, 4.0, 8.0])
        with pytest.raises(ModelUnusable, match=r"rope_freqs\.weight"):
            open_checkpoint(path)

    def test_linear_rope(self, tmp_path: Path) -> None:
        changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_llama(tmp_path / "tiny"), changes=changes)
        assert open_checkpoint(path).config.rope == RopeConfig(1e4, "linear", 2.0)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"general.architecture": "qwen2"}, "architecture qwen2 is not supported"),
            ({"llama.rope.scaling.type": "yarn"}, "rope type yarn"),
            ({"llama.expert_count": 8}, "mixtures of experts"),
            ({"llama.block_count": None}, "llama.block_count is missing"),
            ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count is a list"),
            ({"llama.rope.dimension_count": 8}, "rotating 8 of 16"),
            ({"llama.block_count": 3}, r"missing model\.layers\.2\."),
        ],
        ids=["architecture", "yarn", "experts", "missing", "per-layer", "partial", "layers"],
    )
    def test_refusals(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_llama(tmp_path / "tiny"), changes=changes)
        with pytest.raises(ModelUnusable, match=message) as refusal:
            open_checkpoint(path)
        assert "\n" not in str(refusal.value)

    def test_unknown_tensor_is_named(self, tmp_path: Path) -> None:
        source = write_tiny_llama(tmp_path / "tiny")
        path = write_tiny_gguf(tmp_path / "tiny.gguf", source, extra_tensors=["blk.0.attn_sinks.weight"])
        with pytest.raises(ModelUnusable, match=r"no place for blk\.0\.attn_sinks\.weight"):
            open_checkpoint(path)

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_llama(tmp_path / "tiny"))
        whole = path.read_bytes()
        for length in (*range(64), *range(64, len(whole), len(whole) // 97), len(whole) - 64):
            path.write_bytes(whole[:length])
            with pytest.raises(ModelUnusable, match="not a usable GGUF file"):
                open_checkpoint(path)

    def test_one_changed_byte_changes_the_model_hash(self, tmp_path: Path) -> None:
        path = write_tiny_gguf(tmp_path / "tiny.gguf", write_tiny_llama(tmp_path / "tiny"))
        before = open_checkpoint(path).model_hash()
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)
        assert open_checkpoint(path).model_hash() != before
