"""What a worker answers at its desk for gateways."""

from collections.abc import AsyncIterator

import grpc
import pytest

from common.messages.ids import Epoch
from common.rpc.channels import Channels
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import WorkerStub
from tests.support.worker_fabric import SECRET, Fabric, running_fabric


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


async def test_b048_a_feed_of_another_incarnation_is_refused(fabric: Fabric) -> None:
    # Events of another incarnation would be taken for those of the one that the gateway knows.
    record = (await fabric.decode()).record
    channels = Channels(SECRET)
    stub = WorkerStub(channels.channel(record.address, record.epoch))
    other = stub.Feed(pb.FeedRequest(gateway="gateway-0", epoch=Epoch(record.epoch + 1)), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError, match="epoch") as caught:
        await other.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    own = stub.Feed(pb.FeedRequest(gateway="gateway-0", epoch=record.epoch), timeout=5)
    assert isinstance(await own.read(), pb.FeedFrame)
    own.cancel()
    await channels.close()
