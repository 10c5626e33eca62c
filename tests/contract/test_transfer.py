"""What every page transport promises (`common.transfer.protocols`), checked on all of them."""

import asyncio
import ctypes
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from common.errors import IncompatiblePeer, PeerUnreachable, StalePage
from common.messages.ids import BlockId, Epoch
from common.messages.registry import TransferEndpoint
from common.transfer.host import host_id
from common.transfer.pool_memory import PoolMemory
from common.transfer.pool_source import PoolSource
from common.transfer.puller import Puller, PullReport
from common.transfer.shm_source import SharedMemorySource
from tests.support.page_network import DEADLINE_S, SECRET, Network
from tests.support.pools import LARGE, SMALL, copies, fill, is_copied, make_pool


@pytest.fixture(params=["memory", "shm", "tcp"])
async def network(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    network = Network(request.param, tmp_path)
    async with asyncio.timeout(60), network.stack:
        yield network


class TestTransfer:
    async def test_copies_scattered_and_neighbouring_pages(self, network: Network) -> None:
        theirs, ours = make_pool(num_blocks=16), make_pool(num_blocks=8)
        fill(theirs, range(16), generation=7)
        endpoint = await network.source(theirs).start()
        pairs = [(3, 0), (4, 1), (5, 2), (15, 7), (0, 4)]
        await network.puller(ours).pull(endpoint, theirs.header.epoch, copies(pairs, 7))
        assert all(is_copied(ours, target, source, 7) for source, target in pairs)
        assert not any(any(ours.page(BlockId(untouched))) for untouched in (3, 5, 6))

    async def test_copies_a_hundred_large_pages(self, network: Network) -> None:
        theirs, ours = make_pool(LARGE, 100), make_pool(LARGE, 100)
        fill(theirs, range(100), generation=1)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        await puller.connect(endpoint, theirs.header.epoch)
        await puller.pull(endpoint, theirs.header.epoch, copies(((i, i) for i in range(100)), 1))
        assert all(is_copied(ours, i, i, 1) for i in range(100))

    async def test_no_pages_is_no_work(self, network: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        endpoint = await network.source(theirs).start()
        await network.puller(ours).pull(endpoint, theirs.header.epoch, [])

    async def test_an_outdated_generation_is_stale_and_the_next_pull_works(self, network: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        fill(theirs, range(16), generation=2)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        outdated = copies([(0, 0), (1, 1)], 2) + copies([(2, 2)], 1)
        with pytest.raises(StalePage):
            await puller.pull(endpoint, theirs.header.epoch, outdated)
        await puller.pull(endpoint, theirs.header.epoch, copies([(2, 2)], 2))
        assert is_copied(ours, 2, 2, 2)

    async def test_a_page_beyond_the_pool_is_refused_and_the_next_pull_works(self, network: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        fill(theirs, [0], generation=1)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        with pytest.raises((StalePage, PeerUnreachable)):
            await puller.pull(endpoint, theirs.header.epoch, copies([(10**9, 0)], 0))
        await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0)], 1))
        assert is_copied(ours, 0, 0, 1)

    async def test_another_epoch_is_refused(self, network: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        endpoint = await network.source(theirs).start()
        with pytest.raises(PeerUnreachable):
            await network.puller(ours).connect(endpoint, Epoch(theirs.header.epoch ^ 1))

    async def test_other_page_size_is_incompatible(self, network: Network) -> None:
        theirs, ours = make_pool(LARGE, 2), make_pool(SMALL, 2)
        endpoint = await network.source(theirs).start()
        with pytest.raises(IncompatiblePeer):
            await network.puller(ours).connect(endpoint, theirs.header.epoch)

    async def test_a_closed_peer_is_unreachable(self, network: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        source = network.source(theirs)
        endpoint = await source.start()
        puller = network.puller(ours)
        await puller.connect(endpoint, theirs.header.epoch)
        await source.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PeerUnreachable):
                await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0)], 0))

    async def test_a_restarted_peer_serves_its_new_epoch_only(self, network: Network) -> None:
        old, new, ours = make_pool(), make_pool(), make_pool()
        source = network.source(old)
        endpoint = await source.start()
        puller = network.puller(ours)
        await puller.connect(endpoint, old.header.epoch)
        await source.close()
        fill(new, [5], generation=9)
        endpoint = await network.source(new).start()
        with pytest.raises(PeerUnreachable):
            await puller.pull(endpoint, old.header.epoch, copies([(5, 0)], 0))
        await puller.pull(endpoint, new.header.epoch, copies([(5, 0)], 9))
        assert is_copied(ours, 0, 5, 9)

    async def test_nothing_is_written_after_a_cancelled_pull(self, network: Network) -> None:
        theirs, ours = make_pool(LARGE, 64), make_pool(LARGE, 64)
        fill(theirs, range(64), generation=1)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        wanted = copies(((i, i) for i in range(63)), 1)
        await puller.pull(endpoint, theirs.header.epoch, wanted)
        num_cancelled = 0
        for attempt in range(12):
            pull = asyncio.create_task(puller.pull(endpoint, theirs.header.epoch, wanted))
            try:
                await asyncio.wait_for(pull, 0.0004 * attempt)
            except TimeoutError:
                num_cancelled += 1
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(ours.pages)), 0xA5, ours.pages.nbytes)
            await puller.pull(endpoint, theirs.header.epoch, copies([(63, 63)], 1))
            assert bytes(ours.span(BlockId(0), 63)).count(0xA5) == 63 * ours.header.page_bytes
        assert num_cancelled > 0

    async def test_pulls_run_beside_each_other(self, network: Network) -> None:
        theirs, ours = make_pool(num_blocks=64), make_pool(num_blocks=64)
        fill(theirs, range(64), generation=1)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        pulls = [puller.pull(endpoint, theirs.header.epoch, copies([(63 - i, i)], 1)) for i in range(64)]
        await asyncio.gather(*pulls)
        assert all(is_copied(ours, i, 63 - i, 1) for i in range(64))

    async def test_a_pull_that_succeeds_beside_a_writer_is_consistent(self, network: Network) -> None:
        theirs, ours = make_pool(LARGE, 8), make_pool(LARGE, 8)
        fill(theirs, range(8), generation=1)
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        writer = Writer(theirs)
        num_good = num_stale = 0
        pairs = [(2, 0), (3, 1), (5, 4), (6, 5), (7, 6)]
        with writer:
            while min(num_good, num_stale) < 20:
                generation = writer.finished
                try:
                    await puller.pull(endpoint, theirs.header.epoch, copies(pairs, generation))
                except StalePage:
                    num_stale += 1
                    continue
                num_good += 1
                assert all(is_copied(ours, target, source, generation) for source, target in pairs)
                writer.turn.set()


class Writer(threading.Thread):
    """Reuses all blocks of a pool again and again; `finished` is a generation that was complete when it was read.

    It rests after every second round until a pull has succeeded, or for a moment: so both outcomes happen.
    """

    def __init__(self, pool: PoolMemory) -> None:
        super().__init__(name="writer")
        self._pool = pool
        self._is_over = False
        self.turn = threading.Event()
        self.finished = 1

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *exc_info: object) -> None:
        self._is_over = True
        self.turn.set()
        self.join()

    def run(self) -> None:
        while not self._is_over:
            fill(self._pool, range(8), self.finished + 1)
            self.finished += 1
            if self.finished % 2:
                self.turn.wait(0.02)
                self.turn.clear()


class TestSharedMemory:
    async def test_a_page_reused_during_the_copy_is_stale(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        theirs, ours = make_pool(), make_pool()
        source = SharedMemorySource(theirs, SECRET, tmp_path / "pages.sock")
        puller = Puller(ours, SECRET, host_id(), "shm")
        endpoint = await source.start()

        def copy_while_the_owner_reuses(target: np.ndarray, pages: np.ndarray) -> None:
            target[:] = pages
            theirs.generations[1] = 1

        monkeypatch.setattr(np, "copyto", copy_while_the_owner_reuses)
        with pytest.raises(StalePage):
            await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0), (1, 1)], 0))
        await puller.close()
        await source.close()

    async def test_a_killed_owner_is_noticed_and_its_memory_let_go(self, tmp_path: Path) -> None:
        path = tmp_path / "pages.sock"
        pipe = asyncio.subprocess.PIPE
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(path), SECRET, stdout=pipe)
        assert owner.stdout is not None
        epoch = Epoch(int(await owner.stdout.readline()))
        endpoint = TransferEndpoint("", 0, host_id(), str(path))
        ours = make_pool()
        puller = Puller(ours, SECRET, host_id(), "shm")
        await puller.pull(endpoint, epoch, copies([(3, 0)], 4))
        assert is_copied(ours, 0, 3, 4)
        pool = puller._peers[endpoint, epoch].result()._pool  # type: ignore[attr-defined]  # of SharedMemoryPeer
        is_let_go = asyncio.Event()
        weakref.finalize(pool, is_let_go.set)
        del pool
        owner.kill()
        await asyncio.wait_for(is_let_go.wait(), DEADLINE_S)
        with pytest.raises(PeerUnreachable):
            await puller.pull(endpoint, epoch, copies([(3, 0)], 4))
        await puller.close()
        await owner.wait()

    async def test_the_socket_is_private_and_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "run" / "pages.sock"
        source = SharedMemorySource(make_pool(), SECRET, path)
        await source.start()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        await source.close()
        assert not path.exists()

    async def test_a_socket_left_by_a_dead_owner_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "pages.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        theirs, ours = make_pool(), make_pool()
        source = SharedMemorySource(theirs, SECRET, path)
        puller = Puller(ours, SECRET, host_id(), "shm")
        await puller.connect(await source.start(), theirs.header.epoch)
        await puller.close()
        await source.close()


OWNER = """
import asyncio, sys
from pathlib import Path
from common.transfer.shm_source import SharedMemorySource
from tests.support.pools import fill, make_pool

async def main():
    pool = make_pool()
    fill(pool, range(16), 4)
    await SharedMemorySource(pool, sys.argv[2], Path(sys.argv[1])).start()
    print(pool.header.epoch, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class TestPuller:
    async def test_auto_prefers_shared_memory_and_falls_back_to_tcp(self, tmp_path: Path) -> None:
        theirs, ours = make_pool(), make_pool()
        fill(theirs, [0], generation=1)
        source = PoolSource(theirs, SECRET, "127.0.0.1", socket=tmp_path / "pages.sock")
        endpoint = await source.start()
        reports: list[PullReport] = []
        elsewhere = TransferEndpoint(endpoint.host, endpoint.port, "another host", endpoint.socket)
        unreachable = TransferEndpoint(endpoint.host, endpoint.port, host_id(), str(tmp_path / "nobody.sock"))
        puller = Puller(ours, SECRET, host_id(), "auto", reports.append)
        for each in (endpoint, elsewhere, unreachable):
            await puller.pull(each, theirs.header.epoch, copies([(0, 0)], 1))
        await puller.close()
        await source.close()
        assert [report.transport for report in reports] == ["shm", "tcp", "tcp"]
        assert {report.num_bytes for report in reports} == {theirs.header.page_bytes}

    @pytest.mark.parametrize(
        ("endpoint", "mode", "reason"),
        [
            (TransferEndpoint("10.0.0.1", 1, "another host", "/x.sock"), "shm", "another host"),
            (TransferEndpoint("10.0.0.1", 1, host_id()), "shm", "no shared memory"),
            (TransferEndpoint("", 0, host_id(), "/nobody/pages.sock"), "shm", "/nobody/pages.sock"),
            (TransferEndpoint("", 0, host_id(), "/x.sock"), "tcp", "no pages over TCP"),
        ],
    )
    async def test_a_forced_transport_says_why_it_is_unreachable(
        self, endpoint: TransferEndpoint, mode: str, reason: str
    ) -> None:
        puller = Puller(make_pool(), SECRET, host_id(), mode)  # type: ignore[arg-type]  # shm or tcp
        with pytest.raises(PeerUnreachable, match=reason):
            await puller.connect(endpoint, Epoch(1))
        await puller.close()

    def test_runs_on_uvloop(self, tmp_path: Path) -> None:
        reports: list[PullReport] = []

        async def main() -> None:
            theirs, ours = make_pool(), make_pool()
            fill(theirs, [0], generation=1)
            source = PoolSource(theirs, SECRET, "127.0.0.1", socket=tmp_path / "pages.sock")
            endpoint = await source.start()
            for mode in ("shm", "tcp"):
                puller = Puller(ours, SECRET, host_id(), mode, reports.append)
                await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0), (0, 1)], 1))
                await puller.pull(endpoint, theirs.header.epoch, copies([(0, 2)], 1))
                await puller.close()
            await source.close()
            assert all(is_copied(ours, target, 0, 1) for target in range(3))

        uvloop.run(main())
        assert [report.transport for report in reports] == ["shm", "shm", "tcp", "tcp"]
