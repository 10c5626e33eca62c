"""Limits of keys over HTTP: exact over gateways, refused at once, told in headers, and given back at every stage."""

import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from common.broker.connection import RedisConnection
from common.broker.keys import tenant_keys
from common.broker.limits import Demand
from common.broker.policy import BrokerPolicy
from common.broker.redis_limits import RedisLimits
from common.errors import GenerationFailed, WorkerLost
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits
from gateway.api.keys import SERVICE
from tests.support.gateway_server import Gateway, chat_body, raw_request
from tests.support.keyed_gateway import KeyCabinet, bearer, running_keyed_gateway
from tests.support.polling import until
from tests.support.redis_server import RedisServer
from tests.support.scripted_engine import ScriptedEngine, Silence, Step, Stop, Until
from tests.support.source_tree import ROOT
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

pytestmark = pytest.mark.redis

TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
HI: list[Step] = [*byte_ids(TOKENIZER, "hi"), Stop()]
ONE_AT_ONCE = TenantLimits(max_concurrent=1)
TENANT = TenantId("key-a")


class World:
    """Two gateways of one cluster, their keys, and one Redis."""

    def __init__(self, cabinet: KeyCabinet, first: Gateway, second: Gateway) -> None:
        self.cabinet = cabinet
        self.first = first
        self.second = second

    async def key(self, limits: TenantLimits) -> dict[str, str]:
        """Return the header of a new key that both know."""
        key = await self.cabinet.issue("key-a", limits)
        for gateway in (self.first, self.second):
            await gateway.runner.app[SERVICE].entrance.door.refresh()
        return bearer(key)

    async def status(self, gateway: Gateway, headers: dict[str, str], **fields: object) -> int:
        """Return the status of a short chat."""
        return (await gateway.post(CHAT, chat_body(**fields), headers=headers))[0]

    def play(self, script: list[Step]) -> None:
        """Let both engines play this."""
        for gateway in (self.first, self.second):
            gateway.engine.play(script)


@pytest.fixture
async def world(connection: RedisConnection, tmp_path: Path) -> AsyncIterator[World]:
    cabinet = KeyCabinet(tmp_path)
    await cabinet.issue("key-other")
    async with AsyncExitStack() as stack:
        gateways = []
        for _ in range(2):
            engine = ScriptedEngine([tiny_card(TOKENIZER, max_context=100_000)])
            engine.play(HI)
            entrance = cabinet.entrance(RedisLimits(connection))
            gateways.append(await stack.enter_async_context(running_keyed_gateway(engine, entrance)))
        yield World(cabinet, *gateways)


async def test_two_gateways_let_in_exactly_the_limit(world: World) -> None:
    headers = await world.key(TenantLimits(requests_per_minute=23))
    posts = [world.status((world.first, world.second)[n % 2], headers) for n in range(80)]
    statuses = await asyncio.gather(*posts)
    assert (statuses.count(200), statuses.count(429)) == (23, 57)


async def test_two_gateways_hold_one_limit_of_requests_at_once(world: World) -> None:
    headers, may_end = await world.key(TenantLimits(max_concurrent=5)), asyncio.Event()
    world.play([Until(may_end), *HI])
    posts = [asyncio.create_task(world.status((world.first, world.second)[n % 2], headers)) for n in range(20)]
    await until(lambda: sum(post.done() for post in posts) == 15, "the refused ones are answered")
    assert {post.result() for post in posts if post.done()} == {429}
    await until(lambda: world.first.engine.num_running + world.second.engine.num_running == 5, "five are served")
    may_end.set()
    assert sorted(await asyncio.gather(*posts)) == [200] * 5 + [429] * 15


async def test_a_refusal_says_which_limit_and_when(world: World) -> None:
    headers = await world.key(TenantLimits(requests_per_minute=1, tokens_per_minute=10_000))
    url = world.first.url + CHAT
    async with world.first.session.post(url, json=chat_body(max_tokens=5), headers=headers) as response:
        assert response.status == 200
        assert (response.headers["x-ratelimit-limit-requests"], response.headers["x-ratelimit-limit-tokens"]) == (
            "1",
            "10000",
        )
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(
            r"1m0?(\.\d+)?s|5\d(\.\d+)?s|1m[01](\.\d+)?s", response.headers["x-ratelimit-reset-requests"]
        )
    async with world.second.session.post(url, json=chat_body(), headers=headers) as response:
        assert response.status == 429
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "1 requests per minute" in error["message"]
        assert 55 <= int(response.headers["Retry-After"]) <= 61
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(response.headers["x-ratelimit-remaining-tokens"]) > 9_900
    metrics = (await world.first.get("/metrics"))[1]
    assert 'tandem_requests_refused_total{reason="requests"} 1.0' in metrics
    assert "key-a" not in metrics


async def test_a_stream_tells_its_quota_too(world: World) -> None:
    headers = await world.key(TenantLimits(tokens_per_minute=1000))
    async with world.first.session.post(
        world.first.url + CHAT, json=chat_body(stream=True, max_tokens=100), headers=headers
    ) as response:
        assert int(response.headers["x-ratelimit-remaining-tokens"]) < 900
        await response.read()
    async with world.first.session.post(world.first.url + CHAT, json=chat_body(max_tokens=1), headers=headers) as later:
        assert int(later.headers["x-ratelimit-remaining-tokens"]) > 900  # the answer was short


async def test_n_counts_as_n(world: World) -> None:
    headers = await world.key(TenantLimits(requests_per_minute=3))
    world.play([Stop(), Stop(choice=1)])
    assert await world.status(world.first, headers, n=2) == 200
    assert await world.status(world.second, headers, n=2) == 429
    assert await world.status(world.second, headers) == 200


async def test_b106_a_refused_request_uses_up_nothing(world: World) -> None:
    headers, may_end = await world.key(TenantLimits(requests_per_minute=2, max_concurrent=1)), asyncio.Event()
    world.first.engine.play([Until(may_end), *HI])
    running = asyncio.create_task(world.status(world.first, headers))
    await world.first.engine.until_running(1)
    for _ in range(5):
        assert await world.status(world.second, headers) == 429
    may_end.set()
    assert await running == 200
    assert await world.status(world.second, headers) == 200
    assert await world.status(world.second, headers) == 429


async def test_requests_without_limits_or_keys_ask_redis_nothing(world: World, connection: RedisConnection) -> None:
    headers = await world.key(TenantLimits())
    assert await world.status(world.first, headers) == 200
    assert await connection.call("DBSIZE") == 0


Disturb = Callable[[World, dict[str, str]], Awaitable[None]]


async def _leave(world: World, headers: dict[str, str], before: bytes | None, *, streams: bool) -> None:
    line = "Authorization: " + headers["Authorization"]
    async with world.first.connection() as (reader, writer):
        writer.write(raw_request(CHAT, chat_body(stream=streams, max_tokens=4000), line))
        await world.first.engine.until_running(1)
        if before is not None:
            await reader.readuntil(before)
        writer.transport.abort()
        await world.first.engine.until_running(0)


async def _leave_in_silence(world: World, headers: dict[str, str]) -> None:
    world.first.engine.play([Silence()], HI)
    await _leave(world, headers, None, streams=False)


async def _leave_mid_stream(world: World, headers: dict[str, str]) -> None:
    world.first.engine.play([*byte_ids(TOKENIZER, "abc"), Silence()], HI)
    await _leave(world, headers, b'"c"', streams=True)


async def _run_out_of_time(world: World, headers: dict[str, str]) -> None:
    world.first.engine.play([Silence()], HI)
    timed = headers | {"x-request-deadline-ms": "50"}
    assert await world.status(world.first, timed) == 504


async def _fail_before_the_first_token(world: World, headers: dict[str, str]) -> None:
    world.first.engine.play([GenerationFailed("x")], HI)
    assert await world.status(world.first, headers) == 500


async def _lose_the_worker_mid_stream(world: World, headers: dict[str, str]) -> None:
    world.first.engine.play([*byte_ids(TOKENIZER, "abc"), WorkerLost("x")], HI)
    async with world.first.session.post(
        world.first.url + CHAT, json=chat_body(stream=True), headers=headers | {"Connection": "close"}
    ) as response:
        assert b'"error"' in await response.read()


async def _ask_for_nonsense(world: World, headers: dict[str, str]) -> None:
    assert await world.status(world.first, headers, max_tokens=1_000_000) == 400
    assert await world.status(world.first, headers, model="nobody-has-it") == 404


@pytest.mark.parametrize(
    "disturb",
    [
        _leave_in_silence,
        _leave_mid_stream,
        _run_out_of_time,
        _fail_before_the_first_token,
        _lose_the_worker_mid_stream,
        _ask_for_nonsense,
    ],
)
async def test_b104_the_only_place_is_free_at_once(world: World, disturb: Disturb) -> None:
    headers = await world.key(ONE_AT_ONCE)
    await disturb(world, headers)
    assert await world.status(world.first, headers) == 200
    for _ in range(5):  # one after the other is never two at once
        assert await world.status(world.first, headers) == 200


async def test_refusals_are_fast_and_come_before_the_prompt_is_tokenised(world: World) -> None:
    headers = await world.key(TenantLimits(requests_per_minute=1))
    assert await world.status(world.first, headers) == 200
    long_body = chat_body(messages=[{"role": "user", "content": "word " * 50_000}])
    took_s = []
    for _ in range(100):
        began_s = time.perf_counter()
        assert (await world.first.post(CHAT, long_body, headers=headers))[0] == 429
        took_s.append(time.perf_counter() - began_s)
    assert statistics.median(took_s) < 0.05
    assert len(world.first.engine.requests) == 1


HOLD = """
import asyncio, sys
from common.broker.connection import RedisConnection
from common.broker.keys import tenant_keys
from common.broker.limits import Demand
from common.broker.policy import BrokerPolicy
from common.broker.redis_limits import RedisLimits
from common.messages.ids import RequestId, TenantId
from common.messages.tenant import TenantLimits
from gateway import tenant_permits

async def main():
    tenant_permits.BEAT_S = 0.3
    limits = RedisLimits(RedisConnection(sys.argv[1], command_timeout_s=20.0), BrokerPolicy(permit_ttl_s=1.5))
    permits = tenant_permits.TenantPermits(limits)
    bounds = TenantLimits(max_concurrent=1)
    verdict = await permits.reserve(TenantId("key-a"), bounds, RequestId("theirs"), Demand(1, 1))
    assert verdict.refusal is None
    print("held", flush=True)
    await permits.watch()

asyncio.run(main())
"""


async def test_b104_a_killed_gateway_gives_its_places_back_with_its_leases(
    redis_server: RedisServer, connection: RedisConnection
) -> None:
    limits = RedisLimits(connection, BrokerPolicy(permit_ttl_s=1.5))

    async def is_free() -> bool:
        verdict = await limits.reserve(TenantId("key-a"), ONE_AT_ONCE, RequestId("ours"), Demand(1, 1))
        return verdict.refusal is None

    command = [sys.executable, "-c", HOLD, redis_server.url]
    holder = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert await asyncio.wait_for(holder.stdout.readline(), 30.0) == b"held\n"
        renewed_for_s = time.monotonic() + 3.0
        while time.monotonic() < renewed_for_s:
            assert not await is_free()
            await connection.read(0.1, "XREAD", streams=("nobody-writes-here", "0-0"))
    finally:
        holder.kill()
        await holder.wait()
    died_s = time.monotonic()
    assert not await is_free()
    await until(is_free, "its lease ends", 20.0, look_s=0.05)
    assert time.monotonic() - died_s < 10.0


async def test_a_clock_that_was_set_back_locks_nobody_out(connection: RedisConnection) -> None:
    limits, bounds = RedisLimits(connection), TenantLimits(requests_per_minute=1, tokens_per_minute=100)
    [seconds, _] = await connection.call("TIME")
    requests, tokens, *_ = tenant_keys(TENANT)
    for key in (requests, tokens):  # charged before the clock lost an hour
        await connection.call("HSET", key, int(seconds) + 3600, 1000)
    verdict = await limits.reserve(TENANT, bounds, RequestId("a"), Demand(1, 10))
    assert verdict.refusal is None
    assert verdict.quota.requests is not None
    assert verdict.quota.requests.remaining == 0
    assert verdict.quota.requests.reset_s <= 61
    assert (await limits.reserve(TENANT, bounds, RequestId("b"), Demand(1, 10))).refusal is not None


async def test_leases_that_end_because_redis_was_frozen_go_on(
    redis_server: RedisServer, connection: RedisConnection
) -> None:
    policy, now_s = BrokerPolicy(permit_ttl_s=0.5), 0.0
    theirs = RedisLimits(connection, policy)
    ours = RedisLimits(connection, policy, lambda: now_s)
    assert (await theirs.reserve(TenantId("key-a"), ONE_AT_ONCE, RequestId("a"), Demand(1, 1))).refusal is None
    await connection.read(0.7, "XREAD", streams=("nobody-writes-here", "0-0"))  # nobody could renew
    now_s += 0.7
    assert (await ours.reserve(TenantId("key-a"), ONE_AT_ONCE, RequestId("b"), Demand(1, 1))).refusal is not None
    now_s += 0.1  # whoever lives renews now, and nobody does
    await ours.look()
    now_s += 0.2
    await ours.look()
    now_s += 0.21
    assert (await ours.reserve(TenantId("key-a"), ONE_AT_ONCE, RequestId("c"), Demand(1, 1))).refusal is None
