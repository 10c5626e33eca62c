"""What a gateway remembers of the workers it has told, or has to tell, that a placement is over."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from common.messages.ids import Epoch, GatewayId, PlacementNumber, RequestId, WorkerId
from common.rpc.channels import Channels
from common.telemetry.metrics import GatewayMetrics
from gateway import cancelling as cancelling_module
from gateway.cancelling import Canceller, Notice
from gateway.dispatch import Dispatcher
from gateway.feeds import Feeds
from gateway.proofs import Proofs
from gateway.streams import Source


@pytest.fixture
async def canceller() -> AsyncIterator[Canceller]:
    """A canceller that knows no worker."""
    channels = Channels("a secret for tests")
    listener = Dispatcher(GatewayId("g"), 3, GatewayMetrics(CollectorRegistry()), Proofs(60.0))
    canceller = Canceller(Feeds(GatewayId("g"), channels, listener))
    yield canceller
    await canceller.close()
    await channels.close()


async def test_it_remembers_a_bounded_number(canceller: Canceller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that never come back do not fill the memory."""
    monkeypatch.setattr(cancelling_module, "MAX_NOTICES", 10)
    source = Source(WorkerId("gone"), Epoch(1))
    for number in range(100):
        canceller.cancel(Notice(source, RequestId(f"r{number}"), PlacementNumber(1)))
    await canceller.close()
    assert len(canceller._delivered) == 10
    assert not canceller._sending
