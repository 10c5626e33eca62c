"""Hashes of weight files: whole when small, sampled when large."""

from pathlib import Path

import pytest

from common.model import content_hash
from common.model.content_hash import hash_files

MIB = 1 << 20


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a", bytes(3000))
    before = hash_files([path])
    for position in (0, 1500, 2999):
        content = bytearray(3000)
        content[position] = 1
        assert hash_files([write(path, bytes(content))]) != before
    assert hash_files([write(path, bytes(3001))]) != before


def test_names_count_and_order_does_not(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", b"1"), write(tmp_path / "b", b"2")
    assert hash_files([a, b]) == hash_files([b, a])
    write(a, b"2")
    write(b, b"1")
    swapped = hash_files([a, b])
    write(a, b"1")
    write(b, b"2")
    assert swapped != hash_files([a, b])


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_hash, "FULL_HASH_BYTES", MIB)
    size = 12 * MIB
    path = write(tmp_path / "large", bytes(size))
    before = hash_files([path])
    for position, is_noticed in (
        (100, True),
        (8 * MIB - 1, True),
        (9 * MIB + 7, True),
        (size - 1, True),
        (9 * MIB - 1, False),
    ):
        content = bytearray(size)
        content[position] = 1
        assert (hash_files([write(path, bytes(content))]) != before) == is_noticed
