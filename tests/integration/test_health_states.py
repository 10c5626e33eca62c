"""Every state of a cluster as everybody is told who asks for health: HTTP, gRPC and the list of models agree, and the
gateway itself is alive in all of them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from common.errors import BrokerUnavailable
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerState
from common.telemetry.metrics import GatewayMetrics
from gateway import roster as roster_module
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.entrance import OPEN_ENTRANCE
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, serve_rpc
from gateway.server import close, port_of, serve
from gateway.service import Service
from gateway.settings import GatewaySettings
from tests.support.broker_records import FINGERPRINT
from tests.support.byte_link import ByteLink
from tests.support.canary_harness import CanaryHarness, Player, canary_harness
from tests.support.dispatch_harness import quicken_silence
from tests.support.gateway_server import chat_body
from tests.support.polling import until
from tests.support.rpc_gateway import HOST, channel_to, never
from tests.support.scripted_worker import MODEL
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card

LONG_S = 30.0


@dataclass
class World:
    """A gateway with a worker that may be brought into any state."""

    harness: CanaryHarness
    service: Service
    http: aiohttp.ClientSession
    health: HealthStub
    player: Player
    link: ByteLink
    patch: pytest.MonkeyPatch
    undo: list[Callable[[], None]] = field(default_factory=list)

    async def told(self) -> tuple[int, str]:
        """Return what all of them say: readiness by HTTP, and its reason."""
        async with self.http.get("/health/live") as live:
            assert (live.status, await live.json()) == (200, {"status": "live"})
        async with self.http.get("/health/ready") as ready:
            status, reason = ready.status, (await ready.json()).get("reason", "")
        return status, reason

    async def is_serving(self) -> bool:
        """Return what gRPC says."""
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=""))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_unready(self, reason: str) -> None:
        """Wait until everybody is told that nothing can be served, and why."""

        async def agree() -> bool:
            status, why = await self.told()
            return status == 503 and reason in why and not await self.is_serving()

        await until(agree, f"unready: {reason}", LONG_S)

    async def until_ready(self) -> None:
        """Wait until everybody is told that requests can be served; then one can."""

        async def agree() -> bool:
            return await self.told() == (200, "") and await self.is_serving()

        await until(agree, "ready", LONG_S)
        async with self.http.get("/v1/models") as listed:
            assert [model["id"] for model in (await listed.json())["data"]] == [MODEL]
        async with self.http.post("/v1/chat/completions", json=chat_body(model=MODEL, max_tokens=2)) as answer:
            assert answer.status == 200, await answer.text()

    async def beats(self, health: WorkerHealth) -> None:
        """The worker says how it is."""
        await self.player.worker.beat(health=health)
        self.player.worker.feeds.tell_stalled(health is WorkerHealth.STALLED)

    def lose_registry(self) -> None:
        """Redis is away."""

        async def fail() -> list[WorkerState]:
            raise BrokerUnavailable("Redis is away")

        registry = self.harness.broker.registry
        workers = registry.workers
        self.patch.setattr(registry, "workers", fail)
        self.undo.append(lambda: self.patch.setattr(registry, "workers", workers))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Ready at first."""
    quicken_silence(monkeypatch)
    monkeypatch.setattr(roster_module, "FRESH_S", 0.5, raising=False)
    async with canary_harness(monkeypatch) as harness:
        card = replace(tiny_card(byte_level_tokenizer(), max_context=1024), model=MODEL, fingerprint=FINGERPRINT)
        await harness.broker.registry.publish_card(card)
        link = ByteLink()
        player = await harness.add_player("decode-0", 1, link=link)
        app = create_app(harness.dispatcher, GatewaySettings(), GatewayMetrics(CollectorRegistry()), OPEN_ENTRANCE)
        runner = await serve(app, HOST, 0)
        service = app[SERVICE]
        async with (
            serve_rpc(Generation(service, never), service, RpcAddress(HOST)) as listener,
            channel_to(listener) as channel,
            aiohttp.ClientSession(f"http://{HOST}:{port_of(runner)}") as http,
        ):
            harness.send_canaries(0.1)
            world = World(harness, service, http, HealthStub(channel), player, link, monkeypatch)
            await world.until_ready()
            yield world
        await close(runner, 0)


async def _loads(world: World) -> None:
    await world.beats(WorkerHealth.LOADING)


async def _is_frozen(world: World) -> None:
    world.link.hold()


async def _dies(world: World) -> None:
    await world.player.worker.stop()


async def _is_blocked(world: World) -> None:
    await world.beats(WorkerHealth.STALLED)


async def _hangs(world: World) -> None:
    world.player.hangs = True


async def _computes_no_numbers(world: World) -> None:
    world.player.fails = True


async def _loses_redis(world: World) -> None:
    world.lose_registry()


async def _leaves_only_prefill(world: World) -> None:
    await world.player.worker.stop()
    record = replace(world.player.worker.record, worker="prefill-0", role=Role.PREFILL, epoch=77)
    await world.harness.broker.registry.beat(record, WorkerLoad(health=WorkerHealth.READY))


async def _drains(world: World) -> None:
    await world.beats(WorkerHealth.DRAINING)


async def _gateway_drains(world: World) -> None:
    world.service.admission.begin_drain()


NO_DECODE = "no decode worker is ready"

State = Callable[[World], Awaitable[None]]
STATES: list[tuple[State, str]] = [
    (_loads, NO_DECODE),
    (_is_frozen, ""),
    (_dies, NO_DECODE),
    (_is_blocked, NO_DECODE),
    (_hangs, "nothing came back within"),
    (_computes_no_numbers, "decode-0"),
    (_loses_redis, "the registry does not answer"),
    (_leaves_only_prefill, NO_DECODE),
    (_drains, NO_DECODE),
    (_gateway_drains, "draining"),
]


@pytest.mark.parametrize(("enter", "reason"), STATES, ids=[enter.__name__.strip("_") for enter, _ in STATES])
async def test_b110_who_could_not_serve_says_so_in_every_protocol(world: World, enter: State, reason: str) -> None:
    await enter(world)
    await world.until_unready(reason)


async def _recovers(world: World) -> None:
    for undo in world.undo:
        undo()
    world.link.heal()
    world.player.hangs = world.player.fails = False
    await world.beats(WorkerHealth.READY)


@pytest.mark.parametrize("enter", [_loads, _is_frozen, _is_blocked, _hangs, _computes_no_numbers, _loses_redis])
async def test_b110_who_can_serve_again_says_so_in_every_protocol(world: World, enter: State) -> None:
    await enter(world)
    await world.until_unready("")
    await _recovers(world)
    await world.until_ready()


async def test_b110_who_loads_a_model_that_nobody_has_served_is_not_ready(world: World) -> None:
    """A list of models is no promise: while the only worker loads, its model is known and not served."""
    await world.beats(WorkerHealth.LOADING)
    await world.until_unready(NO_DECODE)
    async with world.http.post("/v1/chat/completions", json=chat_body(model=MODEL)) as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await world.health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
