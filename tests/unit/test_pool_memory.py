"""The sealed memory of a KV pool: who may write it, and what closing means."""

import fcntl
import mmap
import os

import pytest
import torch

from common.errors import IncompatiblePeer, InsufficientMemory, InvalidSetting, MalformedRecord
from common.messages.ids import BlockId, Epoch
from common.transfer.mapped_pool import MappedPool
from common.transfer.pool_header import PoolHeader
from common.transfer.pool_memory import PoolMemory
from tests.support.pools import LARGE, SMALL, make_pool


def test_views_have_the_pool_s_geometry_and_start_as_zeros() -> None:
    pool = make_pool(SMALL, 5)
    assert (pool.generations.format, len(pool.generations), list(pool.generations)) == ("Q", 5, [0] * 5)
    assert (pool.pages.nbytes, pool.page(BlockId(4)).nbytes) == (5 * SMALL.page_bytes, SMALL.page_bytes)
    assert not any(pool.pages)
    assert pool.header.pages_offset % mmap.PAGESIZE == 0


def test_a_generation_holds_64_bits() -> None:
    pool = make_pool()
    pool.generations[3] = 2**64 - 1
    assert list(pool.generations[2:5]) == [0, 2**64 - 1, 0]


def test_a_page_is_part_of_pages() -> None:
    pool = make_pool(SMALL, 3)
    pool.page(BlockId(1))[:4] = b"abcd"
    assert bytes(pool.pages[SMALL.page_bytes : SMALL.page_bytes + 4]) == b"abcd"


def test_pages_are_not_allocated_before_they_are_touched() -> None:
    pool = make_pool(LARGE, 10_000)
    with pool.read_only_file() as fd:
        assert os.fstat(fd).st_blocks * 512 < 1 << 20


def test_a_peer_cannot_write_resize_or_unseal() -> None:
    pool = make_pool()
    with pool.read_only_file() as fd:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # the same user may reopen it: the seals still hold
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            for num_bytes in (0, pool.header.total_bytes + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(again, num_bytes)
            with pytest.raises(PermissionError):
                fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        finally:
            os.close(again)


def test_a_mapped_pool_sees_later_writes_and_cannot_make_any() -> None:
    pool = make_pool()
    with pool.read_only_file() as fd:
        mapped = MappedPool.open(fd, pool.header)
    pool.generations[2] = 77
    pool.page(BlockId(2))[0] = 9
    assert (mapped.generations[2], mapped.pages[2 * SMALL.page_bytes]) == (77, 9)
    assert not mapped.pages.flags.writeable
    assert not mapped.generations.flags.writeable


def test_a_file_that_is_not_the_expected_pool_is_refused() -> None:
    pool = make_pool(num_blocks=4)
    other = PoolHeader(Epoch(pool.header.epoch ^ 1), pool.header.page_bytes, 4)
    larger = PoolHeader(pool.header.epoch, pool.header.page_bytes, 10**12)
    with pool.read_only_file() as fd:
        for expected in (other, larger):
            with pytest.raises(IncompatiblePeer):
                MappedPool.open(fd, expected)
    unsealed = os.memfd_create("unsealed")
    try:
        os.ftruncate(unsealed, pool.header.total_bytes)
        with pytest.raises(IncompatiblePeer, match="sealed"):
            MappedPool.open(unsealed, pool.header)
    finally:
        os.close(unsealed)


@pytest.mark.parametrize("data", [b"", b"tandemKV", bytes(64), b"tandemKV" + (2).to_bytes(8, "little") + bytes(48)])
def test_a_header_that_is_none_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        PoolHeader.unpack(data)


def test_closing_leaves_a_tensor_usable() -> None:
    pool = make_pool()
    tensor = torch.frombuffer(pool.pages, dtype=torch.float32)
    pool.close()
    tensor[0] = 1.5
    assert tensor[0].item() == 1.5


def test_closing_twice_is_fine_and_lets_go_of_the_file() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  # plain names are what is compared
    pool = make_pool()
    pool.close()
    pool.close()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # as above


def test_impossible_sizes_are_start_up_errors() -> None:
    with pytest.raises(InvalidSetting):
        PoolMemory.create(SMALL, 0, Epoch(1))
    with pytest.raises(InsufficientMemory):
        PoolMemory.create(LARGE, 10**13, Epoch(1))


def test_without_memfd_the_pool_works_but_is_not_shareable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.transfer.pool_memory.is_shared_memory_supported", lambda: False)
    pool = make_pool(SMALL, 2)
    pool.page(BlockId(1))[:2] = b"ok"
    pool.generations[1] = 3
    assert not pool.is_shareable
    assert (bytes(pool.pages[SMALL.page_bytes :][:2]), pool.generations[1]) == (b"ok", 3)
