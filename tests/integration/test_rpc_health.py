"""`grpc.health.v1` and reflection beside the service that they tell of."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2

from common.broker.memory_limits import MemoryLimits
from gateway.engine import Readiness
from gateway.rpc import health
from tests.support.keyed_gateway import KeyCabinet
from tests.support.rpc_gateway import RpcGateway, running_rpc_gateway, trailing_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_tokenizer import tiny_card

SERVICE = "tandem.v1.Generation"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
REFLECTIONS = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


@pytest.fixture
async def gateway() -> AsyncIterator[RpcGateway]:
    async with running_rpc_gateway(ScriptedEngine([tiny_card()])) as running:
        yield running


async def check(gateway: RpcGateway, service: str = "") -> int:
    response = await HealthStub(gateway.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(response.status)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_is_readiness(gateway: RpcGateway, service: str) -> None:
    assert await check(gateway, service) == SERVING
    gateway.engine.state = Readiness(is_ready=False, reason="nobody is there")
    assert await check(gateway, service) == NOT_SERVING
    gateway.engine.state = Readiness(is_ready=True)
    gateway.service.admission.begin_drain()
    assert await check(gateway, service) == NOT_SERVING


async def test_all_services_are_listed(gateway: RpcGateway) -> None:
    listed = await HealthStub(gateway.channel).List(health_pb2.HealthListRequest())
    assert {name: entry.status for name, entry in listed.statuses.items()} == {"": SERVING, SERVICE: SERVING}


async def test_other_services_are_not_known(gateway: RpcGateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await check(gateway, "other")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
    watch = HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_a_watch_tells_changes_until_the_listener_leaves(gateway: RpcGateway) -> None:
    watch = HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == SERVING
    gateway.engine.state = Readiness(is_ready=False)
    assert (await watch.read()).status == NOT_SERVING
    gateway.engine.state = Readiness(is_ready=True)
    assert (await watch.read()).status == SERVING
    gateway.service.admission.begin_drain()
    assert (await watch.read()).status == NOT_SERVING
    gateway.listener.leave()
    assert await watch.read() is grpc.aio.EOF


async def test_watches_are_few(gateway: RpcGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 1)
    first = HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await first.read()).status == SERVING
    second = HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await second.read()
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    first.cancel()
    async with asyncio.timeout(5):
        while True:
            third = HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest())
            try:
                assert (await third.read()).status == SERVING
            except grpc.aio.AioRpcError:
                continue
            break
    third.cancel()


async def ask(channel: grpc.aio.Channel, service: str, metadata: Any = (), **question: Any) -> Any:
    """Return the answer to one question of reflection."""
    call = channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    answer = await call.read()
    await call.done_writing()
    if answer is grpc.aio.EOF:
        raise AssertionError(await call.code())
    return answer


@pytest.mark.parametrize("version", REFLECTIONS)
async def test_reflection_tells_what_is_served_and_nothing_else(gateway: RpcGateway, version: str) -> None:
    listed = await ask(gateway.channel, version, list_services="")
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", *REFLECTIONS}
    found = await ask(gateway.channel, version, file_containing_symbol=SERVICE)
    (described,) = found.file_descriptor_response.file_descriptor_proto
    file = FileDescriptorProto.FromString(described)
    assert {method.name for method in file.service[0].method} == {"Generate", "ListModels", "Cancel"}
    internal = await ask(gateway.channel, version, file_by_filename="proto/worker.proto")
    assert internal.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_where_keys_are_needed_health_is_open_and_reflection_is_not(tmp_path: Path) -> None:
    cabinet = KeyCabinet(tmp_path)
    key = await cabinet.issue("a")
    entrance = cabinet.entrance(MemoryLimits())
    async with running_rpc_gateway(ScriptedEngine([tiny_card()]), entrance) as gateway:
        assert await check(gateway) == SERVING
        for version in REFLECTIONS:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await ask(gateway.channel, version, list_services="")
            assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert trailing_of(refusal.value)["tandem-error-code"] == "missing_api_key"
            sent = (("authorization", f"Bearer {key}"),)
            assert (await ask(gateway.channel, version, sent, list_services="")).list_services_response.service
