"""The internal gRPC plumbing, over a real listener with the Worker service."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import IncompatiblePeer, InvalidSetting, PeerUnreachable
from common.messages.ids import Epoch
from common.rpc.channels import Channels
from common.rpc.failures import peer_error
from common.rpc.options import MAX_MESSAGE_BYTES
from common.rpc.server import bind, make_server
from proto import worker_pb2, worker_pb2_grpc
from tests.support.hostile_bytes import finish, hostile_payloads

SECRET = "s3cret of the cluster"
FEED = worker_pb2.FeedRequest(gateway="gateway-0", epoch=1)
CANCEL = worker_pb2.CancelRequest(request="r", placement=1)


@dataclass
class Servicer(worker_pb2_grpc.WorkerServicer):
    cancelled: list[str] = field(default_factory=list)
    num_prompt_bytes: int = 0
    is_feed_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def Cancel(  # noqa: N802  # named in the proto
        self, request: worker_pb2.CancelRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.CancelReply:
        self.cancelled.append(request.request)
        return worker_pb2.CancelReply()

    async def Prompt(  # noqa: N802  # named in the proto
        self, request: worker_pb2.PromptRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.PromptReply:
        self.num_prompt_bytes = len(request.ids)
        return worker_pb2.PromptReply(is_known=True)

    async def Feed(  # noqa: N802  # named in the proto
        self, request: worker_pb2.FeedRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.FeedFrame]:
        try:
            for num_steps in range(3):
                yield worker_pb2.FeedFrame(num_steps=num_steps)
            await asyncio.Event().wait()
        finally:
            self.is_feed_over.set()


@dataclass
class Listening:
    servicer: Servicer
    server: grpc.aio.Server
    address: str


@pytest.fixture
async def listening() -> AsyncIterator[Listening]:
    built = make_server(SECRET)
    servicer = Servicer()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, built)
    port = bind(built, "127.0.0.1")
    await built.start()
    async with asyncio.timeout(20):
        yield Listening(servicer, built, f"127.0.0.1:{port}")
    await built.stop(None)


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels(SECRET)
    yield channels
    await channels.close()


def worker(channel: grpc.aio.Channel) -> "worker_pb2_grpc.WorkerAsyncStub":
    return worker_pb2_grpc.WorkerStub(channel)


async def test_calls_carry_the_secret(listening: Listening, channels: Channels) -> None:
    stub = worker(channels.channel(listening.address, Epoch(1)))
    await stub.Cancel(CANCEL)
    assert listening.servicer.cancelled == ["r"]


async def test_a_stream_carries_the_secret_and_its_end_reaches_the_server(
    listening: Listening, channels: Channels
) -> None:
    call = worker(channels.channel(listening.address, Epoch(1))).Feed(FEED)
    steps = []
    async for frame in call:
        steps.append(frame.num_steps)
        if len(steps) == 3:
            break
    call.cancel()
    await listening.servicer.is_feed_over.wait()
    assert steps == [0, 1, 2]


async def test_a_task_cancelled_inside_a_stream_ends_it_at_the_server(listening: Listening, channels: Channels) -> None:
    is_reading = asyncio.Event()

    async def read() -> None:
        async for _ in worker(channels.channel(listening.address, Epoch(1))).Feed(FEED):
            is_reading.set()

    reading = asyncio.create_task(read())
    await is_reading.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await listening.servicer.is_feed_over.wait()


@pytest.mark.parametrize("metadata", [(), (("tandem-secret", "wrong"),), (("tandem-secret", ""),)])
async def test_a_call_without_the_secret_is_refused(
    listening: Listening, metadata: tuple[tuple[str, str], ...]
) -> None:
    async with grpc.aio.insecure_channel(listening.address) as channel:
        stub = worker(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Cancel(CANCEL, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Feed(FEED, metadata=metadata):
                pass
    assert unary.value.code() is stream.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(peer_error(unary.value, "worker"), IncompatiblePeer)
    assert listening.servicer.cancelled == []


async def test_other_metadata_of_a_call_is_kept(listening: Listening, channels: Channels) -> None:
    stub = worker(channels.channel(listening.address, Epoch(1)))
    call = stub.Cancel(CANCEL, metadata=(("tandem-secret", "wrong"), ("other", "kept")), timeout=5)
    assert await call == worker_pb2.CancelReply()


async def test_large_messages_pass_and_larger_ones_do_not(listening: Listening, channels: Channels) -> None:
    stub = worker(channels.channel(listening.address, Epoch(1)))
    reply = await stub.Prompt(worker_pb2.PromptRequest(ids=bytes(16 << 20)))
    assert reply.is_known
    assert listening.servicer.num_prompt_bytes == 16 << 20
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Prompt(worker_pb2.PromptRequest(ids=bytes(MAX_MESSAGE_BYTES)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_nobody_there_is_unreachable(listening: Listening, channels: Channels) -> None:
    await listening.server.stop(None)
    stub = worker(channels.channel(listening.address, Epoch(1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Cancel(CANCEL, timeout=5)
    error = peer_error(caught.value, "decode-0")
    assert isinstance(error, PeerUnreachable)
    assert "decode-0" in str(error)


async def test_an_unknown_method_is_incompatible(listening: Listening, channels: Channels) -> None:
    channel = channels.channel(listening.address, Epoch(1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker_pb2_grpc.DecodeStub(channel).Announce(worker_pb2.AnnounceRequest())
    assert isinstance(peer_error(caught.value, "decode-0"), IncompatiblePeer)


async def test_a_channel_belongs_to_an_epoch(listening: Listening, channels: Channels) -> None:
    first = channels.channel(listening.address, Epoch(1))
    assert channels.channel(listening.address, Epoch(1)) is first
    call = worker(first).Feed(FEED)
    assert await call.read()
    second = channels.channel(listening.address, Epoch(2))
    assert second is not first
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):  # the old incarnation's feed has ended
        await read_to_end(call)
    await worker(second).Cancel(CANCEL)
    assert listening.servicer.cancelled == ["r"]


async def read_to_end(call: "grpc.aio.UnaryStreamCall[worker_pb2.FeedRequest, worker_pb2.FeedFrame]") -> None:
    while await call.read():
        pass


async def test_a_dropped_address_gets_a_new_channel(listening: Listening, channels: Channels) -> None:
    first = channels.channel(listening.address, Epoch(1))
    channels.drop(listening.address)
    channels.drop(listening.address)
    second = channels.channel(listening.address, Epoch(1))
    assert second is not first
    await worker(second).Cancel(CANCEL)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 99999), ("127.0.0.1", -1), ("no such host", 1), ("203.0.113.1", 1)]
)
async def test_an_impossible_address_is_a_bad_setting(host: str, port: int) -> None:
    server = make_server(SECRET)
    with pytest.raises(InvalidSetting, match=r"port|address"):
        bind(server, host, port)


async def test_a_port_in_use_is_a_bad_setting(listening: Listening) -> None:
    with pytest.raises(InvalidSetting, match="address"):
        bind(make_server(SECRET), "127.0.0.1", int(listening.address.partition(":")[2]))


@pytest.mark.parametrize("secret", ["", " padded", "naïve", "two\nlines"])
async def test_a_secret_that_cannot_travel_is_refused_and_not_repeated(secret: str) -> None:
    for build in (lambda: make_server(secret), lambda: Channels(secret)):
        with pytest.raises(InvalidSetting, match="secret") as caught:
            build()
        assert not secret or secret not in str(caught.value)


async def test_b131_garbage_ends_its_own_connection(listening: Listening, channels: Channels, tmp_path: Path) -> None:
    host, _, port = listening.address.partition(":")

    def send(payload: bytes) -> None:
        sock = socket.create_connection((host, int(port)))
        sock.settimeout(10)
        finish(sock, payload, half_close=True)

    for payload in hostile_payloads(tmp_path / "marker").values():
        await asyncio.to_thread(send, payload)
    await worker(channels.channel(listening.address, Epoch(1))).Cancel(CANCEL)
    assert listening.servicer.cancelled == ["r"]
    assert not (tmp_path / "marker").exists()


def test_it_loads_no_tensors() -> None:
    code = (
        "import sys; import common.rpc.server, common.rpc.channels, common.rpc.failures;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
