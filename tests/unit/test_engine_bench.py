"""The bench of the engine plans real steps, and its limit counts each weight and each page once."""

import random
from pathlib import Path

import pytest
import torch

from bench.engine import steps
from bench.engine.floor import Cost, Limits, layer_weights, step_cost
from bench.engine.report import is_complete, limit_lines, rows, write_document
from bench.engine.steps import (
    BATCHES,
    CONTEXTS,
    PROMPTS,
    Machine,
    Measured,
    decode_plan,
    decode_steps,
    prefill_plans,
    prefill_steps,
    set_up,
)
from bench.machine import commit, machine
from common.model.checkpoint import open_checkpoint
from common.settings.engine import EngineSettings
from tests.support.tiny_models import write_tiny_llama

BLOCK_SIZE = 16


def test_decoding_sequences_share_no_block_and_hold_their_context() -> None:
    plan = decode_plan(3, 100, BLOCK_SIZE, random.Random(0))
    blocks = [block for chunk in plan.chunks for block in chunk.sequence.block_ids]
    assert len(set(blocks)) == len(blocks) == 3 * 7
    assert all((chunk.start, chunk.length, chunk.samples) == (99, 1, True) for chunk in plan.chunks)


def test_the_chunks_of_a_prompt_follow_each_other_and_the_last_one_samples() -> None:
    chunks = [plan.chunks[0] for plan in prefill_plans(600, 256, BLOCK_SIZE, random.Random(0))]
    assert [(one.start, one.length, one.samples) for one in chunks] == [
        (0, 256, False),
        (256, 256, False),
        (512, 88, True),
    ]
    assert sum(plan.num_pairs for plan in prefill_plans(600, 256, BLOCK_SIZE, random.Random(0))) == 600 * 601 // 2


def test_the_weights_of_the_layers_are_those_of_the_files(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny_llama(tmp_path, num_layers=3))
    linear = [name for name in checkpoint.names() if "layers" in name and "proj" in name]
    assert layer_weights(checkpoint.config) == sum(checkpoint.tensor(n, torch.float32).numel() for n in linear)


def test_a_step_reads_weights_once_and_pages_by_token(tmp_path: Path) -> None:
    config = open_checkpoint(write_tiny_llama(tmp_path)).config
    alone = step_cost(config, 512, num_tokens=1, num_pairs=10, contexts=10, rows=1)
    eight = step_cost(config, 512, num_tokens=8, num_pairs=80, contexts=80, rows=8)
    assert eight.num_bytes - alone.num_bytes == 512 * 70
    assert eight.flops == 8 * alone.flops
    headless = step_cost(config, 512, num_tokens=1, num_pairs=10, contexts=10, rows=0)
    assert alone.num_bytes - headless.num_bytes == 2 * config.vocab_size * config.hidden_size


def test_the_slower_of_reading_and_multiplying_is_the_limit() -> None:
    limits = Limits(read_bytes_per_s=10.0, flops_per_s=100.0)
    assert Cost(20.0, 100.0).floor_s(limits) == 2.0
    assert Cost(20.0, 500.0).floor_s(limits) == 5.0


def all_measured() -> list[Measured]:
    decode = [Measured("decode", 1, batch, context, 0.04, 0.02) for batch in BATCHES for context in CONTEXTS]
    return [*decode, *(Measured("prefill", 1, 1, length, 0.5, 0.1) for length in PROMPTS)]


def test_the_share_of_the_limit_and_the_tokens_per_second_are_told() -> None:
    row = rows([Measured("decode", 2, 8, 1024, 0.040, 0.020)])[0]
    assert row == ["decode step of 8, context 1024", "2", "40", "20", "50%", "200"]
    assert rows([Measured("prefill", 2, 1, 1024, 0.5, 0.1)])[0][-2:] == ["20%", "2,048"]


def test_a_table_with_a_missing_shape_is_not_complete(tmp_path: Path) -> None:
    machines = [Machine(1, 3e10, 3e11)]
    assert is_complete(machines, all_measured())
    assert not is_complete(machines, all_measured()[:-1])
    assert not is_complete([*machines, Machine(2, 3e10, 6e11)], all_measured())
    file = tmp_path / "performance.md"
    file.write_text("<!-- bench-engine -->\n<!-- /bench-engine -->\n")
    write_document(machines, all_measured(), file)
    assert limit_lines(machines)[0] in file.read_text()
    assert "| prompt of 4096 tokens, in chunks | 1 |" in file.read_text()


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    file.write_text("nothing\n")
    with pytest.raises(ValueError, match="no markers"):
        write_document([Machine(1, 1.0, 1.0)], [], file)


def test_a_tiny_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"BATCHES": (1, 4), "CONTEXTS": (40, 100), "PROMPTS": (50,), "MOST_TOKENS": 200, "STEPS": 1}
    for name, value in small.items():
        monkeypatch.setattr(steps, name, value)
    rig = set_up(EngineSettings(model=str(write_tiny_llama(tmp_path)), threads=1))
    limits = Limits(1e9, 1e9)
    decode = [(one.batch, one.context) for one in decode_steps(rig, limits, 1)]
    assert decode == [(1, 40), (4, 40), (1, 100)]  # the pages do not hold 4 of 100
    (prompt,) = prefill_steps(rig, limits, 1)
    assert prompt.seconds > 0
    assert prompt.floor_s > 0


def test_a_record_names_commit_and_processor() -> None:
    assert commit()
    assert machine()["cpu"]
