"""How fast pages move between two processes: shared memory and TCP over loopback, beside a plain memory copy.

The owner of the source pool is a process of its own. Each figure is the best of several pulls into memory that has been
touched before, because the first touch of a page measures the kernel's allocation and not the transfer.
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.cache.layout import KVLayout
from common.messages.ids import BlockId, Epoch, Generation
from common.messages.registry import TransferEndpoint
from common.transfer.host import host_id
from common.transfer.pool_memory import PoolMemory, is_shared_memory_supported
from common.transfer.pool_source import PoolSource
from common.transfer.protocols import PageCopy
from common.transfer.puller import Puller, TransferMode

SECRET = "bench"
EPOCH = Epoch(1)


def main() -> None:
    """Measure and print a table."""
    arguments = _parse()
    layout = _layout(arguments.page_bytes)
    with tempfile.TemporaryDirectory() as directory:
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        socket = Path(directory) / "pages.sock"
        owner = spawn.Process(target=_own, args=(there, layout, arguments.pages, socket), daemon=True)
        owner.start()
        rows = asyncio.run(_measure(here.recv(), layout, arguments.pages, arguments.repeats))
        here.send("done")
        owner.join()
    _print(rows, arguments.pages, layout.page_bytes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=100, help="pages of one pull (default %(default)s)")
    parser.add_argument("--page-bytes", type=int, default=368_640, help="a multiple of 64 (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="pulls, of which the best counts (default %(default)s)")
    return parser.parse_args()


def _layout(page_bytes: int) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=page_bytes // 64, block_size=16, dtype="bfloat16")


def _own(parent: multiprocessing.connection.Connection, layout: KVLayout, num_pages: int, socket: Path) -> None:
    memory = _touched_pool(layout, num_pages)

    async def serve() -> None:
        source = PoolSource(memory, SECRET, "127.0.0.1", socket=socket)
        parent.send(await source.start())
        await asyncio.to_thread(parent.recv)
        await source.close()

    asyncio.run(serve())


def _touched_pool(layout: KVLayout, num_pages: int) -> PoolMemory:
    memory = PoolMemory.create(layout, num_pages, EPOCH)
    np.frombuffer(memory.pages, np.uint8).fill(1)
    return memory


async def _measure(
    endpoint: TransferEndpoint, layout: KVLayout, num_pages: int, repeats: int
) -> Sequence[tuple[str, float]]:
    memory = _touched_pool(layout, num_pages)
    rows = [("memory copy", _best_copy(memory, repeats))]
    modes: list[TransferMode] = ["shm", "tcp"] if is_shared_memory_supported() else ["tcp"]
    in_order = [PageCopy(BlockId(i), Generation(0), BlockId(i)) for i in range(num_pages)]
    scattered = [PageCopy(BlockId(i), Generation(0), BlockId(num_pages - 1 - i)) for i in range(num_pages)]
    for mode in modes:
        rows.append((f"{mode}, neighbouring pages", await _best_pull(memory, endpoint, mode, in_order, repeats)))
        rows.append((f"{mode}, scattered pages", await _best_pull(memory, endpoint, mode, scattered, repeats)))
    return rows


def _best_copy(memory: PoolMemory, repeats: int) -> float:
    target = np.frombuffer(memory.pages, np.uint8)
    source = np.ones_like(target)
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        durations.append(time.perf_counter() - started)
    return min(durations)


async def _best_pull(
    memory: PoolMemory, endpoint: TransferEndpoint, mode: TransferMode, copies: Sequence[PageCopy], repeats: int
) -> float:
    durations: list[float] = []
    puller = Puller(memory, SECRET, host_id(), mode, lambda report: durations.append(report.duration_s))
    for _ in range(repeats):
        await puller.pull(endpoint, EPOCH, copies)
    await puller.close()
    return min(durations)


def _print(rows: Sequence[tuple[str, float]], num_pages: int, page_bytes: int) -> None:
    table = Table(title=f"{num_pages} pages of {page_bytes} bytes")
    table.add_column("way")
    for column in ("ms", "GB/s", "of a memory copy"):
        table.add_column(column, justify="right")
    copy_s = rows[0][1]
    for way, duration_s in rows:
        rate = num_pages * page_bytes / duration_s / 1e9
        table.add_row(way, f"{duration_s * 1e3:.2f}", f"{rate:.2f}", f"{copy_s / duration_s:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
