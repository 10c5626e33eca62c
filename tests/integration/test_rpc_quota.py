"""What a caller has left of its minute is told by a call's trailing metadata as by the headers of HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from common.broker.memory_limits import MemoryLimits
from common.messages.tenant import TenantLimits
from proto.tandem.v1 import generate_pb2 as pb
from tests.support.gateway_server import chat_body
from tests.support.keyed_gateway import KeyCabinet, bearer
from tests.support.rpc_gateway import RpcGateway, running_rpc_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
REQUEST = pb.GenerateRequest(model="tiny", text="hello", sampling=pb.Sampling(max_tokens=5))
PREFIX = "x-ratelimit-"
NAMES = {f"{PREFIX}{kind}-{what}" for kind in ("limit", "remaining", "reset") for what in ("requests", "tokens")}


@asynccontextmanager
async def keyed(folder: Path, limits: TenantLimits) -> AsyncIterator[tuple[RpcGateway, str]]:
    """A gateway at which no time passes, and the key of a tenant."""
    cabinet = KeyCabinet(folder)
    key = await cabinet.issue("key-a", limits)
    engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=100_000)])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    entrance = cabinet.entrance(MemoryLimits(lambda: 1000.0))
    async with running_rpc_gateway(engine, entrance) as gateway:
        yield gateway, key
    assert entrance.tenants is not None
    await entrance.tenants.close()


async def called(gateway: RpcGateway, key: str) -> dict[str, str]:
    """Make a call that succeeds; return what its end tells of limits."""
    call = gateway.stub.Generate(REQUEST, metadata=(("authorization", f"Bearer {key}"),))
    assert [message async for message in call]
    assert await call.code() is grpc.StatusCode.OK
    return _quota((await call.trailing_metadata()) or ())


def _quota(fields: object) -> dict[str, str]:
    return {name: str(value) for name, value in dict(fields).items() if name.startswith(PREFIX)}  # type: ignore[call-overload]


async def test_calls_and_requests_of_http_are_told_the_same(tmp_path: Path) -> None:
    limits = TenantLimits(requests_per_minute=60, tokens_per_minute=60_000)
    told = {}
    for protocol in ("http", "grpc"):
        folder = tmp_path / protocol
        folder.mkdir()
        async with keyed(folder, limits) as (gateway, key):
            if protocol == "grpc":
                told[protocol] = await called(gateway, key)
                charged = len(gateway.engine.requests[0].prompt_ids) + 5  # its prompt, and the longest answer
                assert told["grpc"][f"{PREFIX}remaining-tokens"] == str(60_000 - charged)
                continue
            url, body = f"{gateway.http.url}/v1/chat/completions", chat_body(max_tokens=5)
            async with gateway.http.session.post(url, json=body, headers=bearer(key)) as response:
                assert response.status == 200
                told[protocol] = _quota({name.lower(): value for name, value in response.headers.items()})
    assert told["http"].keys() == told["grpc"].keys() == NAMES
    exact = [name for name in NAMES if name.endswith("requests") or name.startswith(f"{PREFIX}limit")]
    assert {name: told["http"][name] for name in exact} == {name: told["grpc"][name] for name in exact}
    assert told["grpc"][f"{PREFIX}remaining-requests"] == "59"
    assert told["grpc"][f"{PREFIX}reset-requests"] == "1m1s"


async def test_a_call_that_is_refused_is_told_what_is_left(tmp_path: Path) -> None:
    async with keyed(tmp_path, TenantLimits(requests_per_minute=1)) as (gateway, key):
        first = await called(gateway, key)
        assert (first[f"{PREFIX}limit-requests"], first[f"{PREFIX}remaining-requests"]) == ("1", "0")
        code, trailing = await gateway.refused(REQUEST, metadata=(("authorization", f"Bearer {key}"),))
        assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
        assert _quota(trailing) == first  # no time has passed
        assert trailing["retry-after"] == "61"


@pytest.mark.parametrize("limits", [TenantLimits(), TenantLimits(max_concurrent=3)])
async def test_who_has_no_limit_per_minute_is_told_of_none(tmp_path: Path, limits: TenantLimits) -> None:
    async with keyed(tmp_path, limits) as (gateway, key):
        assert await called(gateway, key) == {}
