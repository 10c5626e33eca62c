"""With --verify-pages a page that arrives with other bytes than announced loses its try and never spoils an answer."""

from collections.abc import AsyncIterator, Sequence

import pytest

from common.messages.ids import Epoch
from common.messages.registry import TransferEndpoint
from common.transfer.protocols import PageCopy
from decode_worker.worker import DecodeWorker
from tests.support.feed_client import make_job
from tests.support.scripted_author import ScriptedAuthor
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(700, 730))
TOKENS = answer(PROMPT, 5)


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


def corrupt_pulls(decode: Node[DecodeWorker], num_pulls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one bit of the last page of each of the next pulls arrive wrongly."""
    inner = puller(decode)._inner
    pull, memory = inner.pull, decode.edge.foundation.memory
    num_left = num_pulls

    async def pull_wrongly(endpoint: TransferEndpoint, epoch: Epoch, copies: Sequence[PageCopy]) -> None:
        nonlocal num_left
        await pull(endpoint, epoch, copies)
        if num_left:
            num_left -= 1
            memory.page(copies[-1].target)[0] ^= 1

    monkeypatch.setattr(inner, "pull", pull_wrongly)


async def answered(
    fabric: Fabric, num_corrupt: int, monkeypatch: pytest.MonkeyPatch, *, verify_pages: bool
) -> list[int]:
    """Return the answer to one request whose first pulls bring a wrong bit."""
    decode = await fabric.decode(verify_pages=verify_pages)
    prefill = await fabric.prefill(verify_pages=verify_pages)
    client = await fabric.client(decode.record, prefill.record)
    await fabric.know(decode, prefill)
    corrupt_pulls(decode, num_corrupt, monkeypatch)
    await client.place(make_job("r", PROMPT), decode.record)
    tokens = (await client.answer("r", deadline_s=20)).tokens
    await fabric.until_idle()
    assert decode.edge.metrics.corrupt_pages._value.get() == (num_corrupt if verify_pages else 0)
    return tokens


async def test_pages_that_arrive_as_announced(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answered(fabric, 0, monkeypatch, verify_pages=True) == TOKENS


@pytest.mark.parametrize("num_corrupt", [1, 2])
async def test_a_page_that_arrives_with_another_bit_is_noticed(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, num_corrupt: int
) -> None:
    """The next try brings the page as it is; after the last one the prompt is computed where it is decoded."""
    assert await answered(fabric, num_corrupt, monkeypatch, verify_pages=True) == TOKENS


async def test_without_checksums_the_bit_goes_unnoticed(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answered(fabric, 1, monkeypatch, verify_pages=False) != TOKENS


@pytest.mark.parametrize("is_verified", [False, True])
async def test_pages_are_announced_with_checksums_only_when_they_are_verified(
    fabric: Fabric, is_verified: bool
) -> None:
    author = ScriptedAuthor(fabric.broker, SECRET)
    await author.start()
    await fabric.prefill(verify_pages=is_verified)
    await author.publish("r", PROMPT)
    await author.committed("r")
    assert [page.HasField("checksum") for page in author.pages("r")] == [is_verified] * 8
    await author.stop()
