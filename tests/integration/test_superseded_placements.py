"""A placement that is followed by a younger one of its request is not computed any further, and holds nothing."""

from collections.abc import AsyncIterator

import pytest

from common.broker.protocols import QueuedJob
from common.messages.ids import EntryId
from tests.support.feed_client import make_job
from tests.support.polling import until
from tests.support.tagged_pages import answer
from tests.support.worker_fabric import Fabric, running_fabric

PROMPT = list(range(20))
MAX_TOKENS = 60


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


async def test_the_older_placement_stops(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    tokens = answer(PROMPT, MAX_TOKENS)
    decode.valve.close()
    await client.place(make_job("r", PROMPT, max_tokens=MAX_TOKENS), decode.record)
    await until(lambda: decode.valve.is_holding, "the older one runs")
    younger = make_job("r", PROMPT, placement=2, shown=tokens[:50], max_tokens=MAX_TOKENS)
    decode.worker._intake.accept(QueuedJob(EntryId("9999999999999-0"), younger))
    decode.valve.open()
    assert (await client.answer("r", 2)).tokens == tokens[50:]
    await fabric.until_idle()
    num_steps = sum(key.placement == 1 for key, _, _ in decode.valve.spans)
    assert num_steps == 1, "only the step that had begun"
