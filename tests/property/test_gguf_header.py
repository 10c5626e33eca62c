"""Damaged GGUF files: whatever bytes change, the file opens or is refused as a whole; nothing else happens."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ModelUnusable
from common.model.checkpoint import open_checkpoint
from common.model.gguf_header import read_header
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return write_tiny_gguf(directory / "tiny.gguf", write_tiny_llama(directory / "tiny", num_layers=1))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes(tiny_gguf: Path, data: st.DataObject) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    header_end = min(entry.offset for entry in read_header(memoryview(content)).tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        # The short keys in front describe the geometry; most of the rest is the vocabulary.
        end = data.draw(st.sampled_from([1024, header_end]))
        content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    damaged = tiny_gguf.with_name("damaged.gguf")
    damaged.write_bytes(content)
    try:
        checkpoint = open_checkpoint(damaged)
        checkpoint.card_source()
    except ModelUnusable:
        return
    assert all(checkpoint.tensor(name, torch.float32).ndim for name in checkpoint.names())


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_after_the_magic(content: bytes) -> None:
    whole = b"GGUF\x03\x00\x00\x00" + content
    try:
        header = read_header(memoryview(whole))
    except ValueError:
        return
    assert all(entry.offset + entry.num_bytes <= len(whole) for entry in header.tensors)
