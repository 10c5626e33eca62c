"""Fingerprints: equal for workers that may exchange pages, different for all others."""

from dataclasses import fields, replace
from typing import Any

import pytest

from common.cache.layout import KVLayout
from common.model import fingerprint as module
from common.model.config import ModelConfig, RopeConfig
from common.model.fingerprint import fingerprint

CONFIG = ModelConfig("llama", 2, 64, 4, 2, 16, 96, 320, 1e-5, RopeConfig(1e4), 2048, tie_embeddings=True)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")


def changed(value: object) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2
        case str():
            return value + "x"
        case _:
            return RopeConfig(5e5)


def test_is_a_function_of_its_arguments() -> None:
    assert fingerprint("m", CONFIG, LAYOUT) == fingerprint("m", replace(CONFIG), replace(LAYOUT))
    assert fingerprint("m", CONFIG, LAYOUT) != fingerprint("n", CONFIG, LAYOUT)


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig) if field.name != "max_context"])
def test_geometry_counts(name: str) -> None:
    other = replace(CONFIG, **{name: changed(getattr(CONFIG, name))})
    assert fingerprint("m", other, LAYOUT) != fingerprint("m", CONFIG, LAYOUT)


@pytest.mark.parametrize("name", [field.name for field in fields(KVLayout)])
def test_page_layout_counts(name: str) -> None:
    other = replace(LAYOUT, **{name: changed(getattr(LAYOUT, name))})
    assert fingerprint("m", CONFIG, other) != fingerprint("m", CONFIG, LAYOUT)


@pytest.mark.parametrize("name", ["PROTOCOL_VERSION", "PAGE_LAYOUT"])
def test_protocol_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint("m", CONFIG, LAYOUT)
    monkeypatch.setattr(module, name, changed(getattr(module, name)))
    assert fingerprint("m", CONFIG, LAYOUT) != before


def test_context_limit_does_not_count() -> None:
    assert fingerprint("m", replace(CONFIG, max_context=128), LAYOUT) == fingerprint("m", CONFIG, LAYOUT)
