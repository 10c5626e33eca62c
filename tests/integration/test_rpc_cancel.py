"""`tandem.v1.Generation` over a real listener: what a client of gRPC sees."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from common.errors import BrokerUnavailable, InvalidSetting
from common.messages.ids import RequestId, TenantId
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, serve_rpc
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tests.support.rpc_gateway import HOST, channel_to, lone_service, trailing_of
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

SERVICE = lone_service(ScriptedEngine([]))
OWN = secrets.token_hex(16)


class Requests:
    """Requests under way; `fails` stands for a Redis that is away."""

    def __init__(self) -> None:
        self.under_way = {OWN}
        self.fails = False

    async def cancel(self, request: RequestId, tenant: TenantId) -> bool:
        """End one."""
        if self.fails:
            raise BrokerUnavailable("Redis is away")
        is_known = request in self.under_way
        self.under_way.discard(request)
        return is_known


@asynccontextmanager
async def client(requests: Requests, *, port: int = 0) -> AsyncIterator[tuple["GenerationAsyncStub", int]]:
    async with (
        serve_rpc(Generation(SERVICE, requests.cancel), SERVICE, RpcAddress(HOST, port)) as listener,
        channel_to(listener) as channel,
    ):
        yield GenerationStub(channel), listener.port


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
async def test_a_request_is_named_by_the_id_of_its_response(prefix: str) -> None:
    requests = Requests()
    async with client(requests) as (stub, _):
        assert (await stub.Cancel(pb.CancelRequest(id=prefix + OWN))).is_known
        assert not (await stub.Cancel(pb.CancelRequest(id=prefix + OWN))).is_known
    assert requests.under_way == set()


@pytest.mark.parametrize("name", ["", "my-request-1", "chatcmpl-", OWN[:-1], OWN.upper(), f"cmpl-{OWN}\n", f"x-{OWN}"])
async def test_other_names_are_refused(name: str) -> None:
    requests = Requests()
    async with client(requests) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Cancel(pb.CancelRequest(id=name))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing_of(refusal.value)["tandem-error-param"] == "id"
    assert requests.under_way == {OWN}


async def test_a_cluster_that_cannot_be_asked_is_unavailable() -> None:
    requests = Requests()
    requests.fails = True
    async with client(requests) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Cancel(pb.CancelRequest(id=OWN))
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert trailing_of(failure.value)["tandem-error-code"] == "unavailable"
    assert trailing_of(failure.value)["retry-after"] == "1"


async def test_a_port_is_not_shared_by_accident() -> None:
    async with client(Requests()) as (_, port):
        with pytest.raises(InvalidSetting, match="rpc_port"):
            async with client(Requests(), port=port):
                pass


async def test_gateways_of_one_cluster_share_a_port() -> None:
    generation = Generation(SERVICE, Requests().cancel)
    async with (
        serve_rpc(generation, SERVICE, RpcAddress(HOST, reuse_port=True)) as first,
        serve_rpc(generation, SERVICE, RpcAddress(HOST, first.port, reuse_port=True)) as again,
    ):
        assert again.port == first.port
