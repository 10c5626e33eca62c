"""Pages that their owner reuses while they are pulled: the puller hears of it, whatever moment it was."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from common.errors import StalePage
from common.messages.ids import BlockId
from common.transfer import tcp_source
from common.transfer.runs import spans_of
from tests.support.page_network import Network
from tests.support.pools import copies, fill, is_copied, make_pool


@pytest.fixture(params=["memory", "shm", "tcp"])
async def network(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    network = Network(request.param, tmp_path)
    async with network.stack:
        yield network


async def test_a_page_that_is_stale_is_not_copied(network: Network) -> None:
    theirs, ours = make_pool(), make_pool()
    fill(theirs, [0, 1], 7)
    endpoint = await network.source(theirs).start()
    puller = network.puller(ours)
    with pytest.raises(StalePage):
        await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0)], 6))
    assert not any(ours.page(BlockId(0))), "another one's content came"
    await puller.pull(endpoint, theirs.header.epoch, copies([(1, 1)], 7))
    assert is_copied(ours, 1, 1, 7)


async def test_a_page_reused_on_its_way_through_tcp_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = make_pool(), make_pool()
    fill(theirs, [0, 1, 2], 7)

    def reused_behind_its_bytes(pages: Sequence[BlockId], max_pages: int) -> Iterator[tuple[BlockId, int]]:
        yield from spans_of(pages, max_pages)
        fill(theirs, [1], 8)

    monkeypatch.setattr(tcp_source, "spans_of", reused_behind_its_bytes)
    network = Network("tcp", tmp_path)
    async with network.stack:
        endpoint = await network.source(theirs).start()
        puller = network.puller(ours)
        with pytest.raises(StalePage):
            await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0), (1, 1)], 7))
        await puller.pull(endpoint, theirs.header.epoch, copies([(2, 2)], 7))
        assert is_copied(ours, 2, 2, 7)
