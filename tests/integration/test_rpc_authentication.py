"""Keys at the gRPC listener: every method asks for one, and a tenant ends its own requests alone."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from common.broker.memory_limits import MemoryLimits
from common.messages.ids import ANYBODY, TenantId
from gateway.entrance import OPEN_ENTRANCE
from gateway.rpc import authenticating
from gateway.rpc.listener import RpcAddress, serve_rpc
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationServicer, GenerationStub
from tests.support.keyed_gateway import KeyCabinet
from tests.support.rpc_gateway import HOST, channel_to, lone_service, trailing_of
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

OWN = secrets.token_hex(16)
METHODS = [method.full_name.rpartition(".")[::2] for method in pb.DESCRIPTOR.services_by_name["Generation"].methods]


class Echo(GenerationServicer):
    """Notes who cancels; nothing else is called here."""

    def __init__(self) -> None:
        self.callers: list[TenantId] = []

    async def Cancel(  # noqa: N802 - named by the service
        self, request: pb.CancelRequest, context: "grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelReply]"
    ) -> pb.CancelReply:
        self.callers.append(authenticating.caller.get().tenant)
        return pb.CancelReply(is_known=True)

    def Generate(  # noqa: N802 - named by the service
        self,
        request: pb.GenerateRequest,
        context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]",
    ) -> AsyncIterator[pb.GenerateResponse]:
        raise NotImplementedError

    async def ListModels(  # noqa: N802 - named by the service
        self,
        request: pb.ListModelsRequest,
        context: "grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsReply]",
    ) -> pb.ListModelsReply:
        raise NotImplementedError


@pytest.fixture
async def keys(tmp_path: Path) -> tuple[KeyCabinet, str]:
    cabinet = KeyCabinet(tmp_path)
    return cabinet, await cabinet.issue("key-a")


@asynccontextmanager
async def calling(servicer: GenerationServicer, cabinet: KeyCabinet | None) -> AsyncIterator[grpc.aio.Channel]:
    entrance = OPEN_ENTRANCE if cabinet is None else cabinet.entrance(MemoryLimits())
    async with (
        serve_rpc(servicer, lone_service(ScriptedEngine([]), entrance), RpcAddress(HOST)) as listener,
        channel_to(listener) as channel,
    ):
        yield channel


def metadata(*values: str) -> tuple[tuple[str, str], ...]:
    return tuple(("authorization", value) for value in values)


async def test_b139_a_call_with_a_key_is_its_tenants(keys: tuple[KeyCabinet, str]) -> None:
    cabinet, key = keys
    echo = Echo()
    async with calling(echo, cabinet) as channel:
        stub: GenerationAsyncStub = GenerationStub(channel)
        for scheme in ("Bearer", "bearer"):
            await stub.Cancel(pb.CancelRequest(id=OWN), metadata=metadata(f"{scheme} {key}"))
    assert echo.callers == ["key-a", "key-a"]


async def test_b139_every_method_asks_for_a_key(keys: tuple[KeyCabinet, str]) -> None:
    cabinet, key = keys
    echo = Echo()
    refused = [(), metadata("Bearer x"), metadata(key), metadata(f"Bearer {key}", f"Bearer {key}")]
    paths = [f"/{service}/{name}" for service, name in METHODS]
    paths += ["/tandem.v1.Generation/Nothing", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/x/y"]
    assert "/tandem.v1.Generation/Cancel" in paths
    async with calling(echo, cabinet) as channel:
        for path in paths:
            for sent in refused:
                with pytest.raises(grpc.aio.AioRpcError) as unary:
                    await channel.unary_unary(path, request_serializer=bytes)(b"", metadata=sent)
                with pytest.raises(grpc.aio.AioRpcError) as stream:
                    async for _ in channel.stream_stream(path)(metadata=sent):
                        pass
                assert (path, unary.value.code()) == (path, grpc.StatusCode.UNAUTHENTICATED)
                assert (path, stream.value.code()) == (path, grpc.StatusCode.UNAUTHENTICATED)
                assert key not in (unary.value.details() or "")
                assert trailing_of(stream.value)["tandem-error-code"] in ("missing_api_key", "invalid_api_key")
    assert echo.callers == []


async def test_keys_that_cannot_be_read_are_no_reason_to_ask_for_another(tmp_path: Path) -> None:
    cabinet = KeyCabinet(tmp_path)
    key = await cabinet.issue("key-a")
    (tmp_path / "keys.json").unlink()
    async with calling(Echo(), cabinet) as channel:
        stub: GenerationAsyncStub = GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Cancel(pb.CancelRequest(id=OWN), metadata=metadata(f"Bearer {key}"))
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_keys_everybody_is_the_same() -> None:
    echo = Echo()
    async with calling(echo, None) as channel:
        stub: GenerationAsyncStub = GenerationStub(channel)
        await stub.Cancel(pb.CancelRequest(id=OWN))
    assert echo.callers == [ANYBODY]
