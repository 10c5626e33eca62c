"""The reply to an internal call: what goes wrong with the call never looks like a cancellation of its caller."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import pytest

from common.errors import IncompatiblePeer, PeerUnreachable
from common.messages.ids import Epoch
from common.rpc.channels import Channels
from common.rpc.failures import reply_from
from common.rpc.server import bind, make_server
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import PrefillServicer, PrefillStub, add_PrefillServicer_to_server
from tests.support.polling import turns

if TYPE_CHECKING:
    from proto.worker_pb2_grpc import PrefillAsyncStub

SECRET = "correct horse battery staple"


class Silent(PrefillServicer):
    """Answers when it may."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.server = make_server(SECRET)
        add_PrefillServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1')}"

    async def Renew(  # noqa: N802 - named by the service
        self, request: pb.RenewRequest, context: "grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewReply]"
    ) -> pb.RenewReply:
        self.is_asked.set()
        await self.may_answer.wait()
        return pb.RenewReply(epoch=7)

    async def Release(  # noqa: N802 - named by the service
        self, request: pb.ReleaseRequest, context: "grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseReply]"
    ) -> pb.ReleaseReply:
        raise NotImplementedError


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    silent = Silent()
    await silent.server.start()
    yield silent
    await silent.server.stop(None)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels(SECRET)
    yield channels
    await channels.close()


def stub(channels: Channels, silent: Silent, epoch: int = 1) -> "PrefillAsyncStub":
    return PrefillStub(channels.channel(silent.address, Epoch(epoch)))


async def renew(client: "PrefillAsyncStub", timeout_s: float = 10) -> pb.RenewReply:
    return await reply_from("prefill-0", client.Renew(pb.RenewRequest(), timeout=timeout_s))


async def test_an_answer(silent: Silent, channels: Channels) -> None:
    silent.may_answer.set()
    assert (await renew(stub(channels, silent))).epoch == 7


async def test_no_answer_in_time(silent: Silent, channels: Channels) -> None:
    with pytest.raises(PeerUnreachable, match="prefill-0"):
        await renew(stub(channels, silent), 0.05)


async def test_another_secret(silent: Silent) -> None:
    channels = Channels("another one")
    with pytest.raises(IncompatiblePeer, match="prefill-0"):
        await renew(stub(channels, silent))
    await channels.close()


async def test_b048_a_channel_that_is_dropped_during_the_call(silent: Silent, channels: Channels) -> None:
    call = asyncio.create_task(renew(stub(channels, silent)))
    await silent.is_asked.wait()
    channels.channel(silent.address, Epoch(2))
    with pytest.raises(PeerUnreachable, match="prefill-0"):
        await call


async def test_b048_a_channel_that_was_dropped_before_the_call(silent: Silent, channels: Channels) -> None:
    client = stub(channels, silent)
    channels.drop(silent.address)
    await channels.close()
    with pytest.raises(PeerUnreachable, match="prefill-0"):
        await renew(client)


async def test_a_cancellation_of_the_caller_stays_one(silent: Silent, channels: Channels) -> None:
    call = asyncio.create_task(renew(stub(channels, silent)))
    await silent.is_asked.wait()
    call.cancel()
    await turns()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_timeout_around_it_stays_one(silent: Silent, channels: Channels) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await renew(stub(channels, silent))
