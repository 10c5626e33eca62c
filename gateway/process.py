"""A gateway process: the application over the cluster, from the first look at the registry to the last open stream."""

import asyncio
import contextlib
import logging
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from common.broker.connection import RedisConnection
from common.broker.policy import BrokerPolicy
from common.broker.redis_broker import RedisBroker
from common.broker.redis_notices import RedisNoticeBoard
from common.broker.redis_registry import RedisModelIndex
from common.lifecycle.garbage import settle
from common.lifecycle.signals import StopSignals
from common.messages.ids import GatewayId, ModelName
from common.rpc.channels import Channels
from common.settings.gateway import GatewayProcessSettings, own_socket_in
from common.telemetry.logs import setup_logging
from common.telemetry.metrics import GatewayMetrics
from common.telemetry.traces import flush_tracing, setup_tracing
from common.tls.server_files import server_files_of
from gateway.api.keys import SERVICE
from gateway.app import create_app
from gateway.canary import Canary, proof_window_s
from gateway.canary_targets import list_targets
from gateway.cancel_board import CancelBoard
from gateway.certificates import Certificates
from gateway.dispatch import Dispatcher
from gateway.engine import Readiness
from gateway.entrance import open_entrance
from gateway.feeds import Feeds
from gateway.laggards import Laggards
from gateway.listeners import descriptors_of_systemd, inherit
from gateway.proofs import Proofs
from gateway.roster import ModelView, Roster
from gateway.rpc.generation import Generation
from gateway.rpc.listener import RpcAddress, serve_rpc
from gateway.server import accept_from, answer_at, close, ignore, listen, port_of, set_up
from gateway.settings import GatewaySettings
from gateway.under_way import UnderWay

logger = logging.getLogger(__name__)

FIRST_READY_S = 10.0
"""So long a new gateway leaves the connections of a shared socket to others while it could not serve them."""

LOOK_S = 0.02


def start_gateway(settings: GatewayProcessSettings) -> int:
    """Serve until told to stop; returns the exit code."""
    settings.refuse_exposure(settings.host)
    gateway = GatewayId(f"gateway-{secrets.token_hex(8)}")
    setup_logging(gateway, settings.log_level, fmt=settings.log_format)
    setup_tracing("gateway", settings.otlp_endpoint, gateway)
    return uvloop.run(_run(settings, gateway))


@dataclass(frozen=True, slots=True)
class ClusterEnd:
    """A gateway's end of its cluster: generates, and ends requests by their id wherever they are."""

    engine: Dispatcher
    under_way: UnderWay
    cancels: CancelBoard


@contextlib.asynccontextmanager
async def open_cluster(
    gateway: GatewayId, settings: GatewayProcessSettings, metrics: GatewayMetrics
) -> AsyncIterator[ClusterEnd]:
    """Connect to a cluster and keep its view up to date while entered."""
    connection = RedisConnection(settings.redis_url or "")
    channels = Channels(settings.secret)
    proofs = Proofs(proof_window_s(settings.canary_interval_s))
    dispatcher = Dispatcher(gateway, settings.max_failures, metrics, proofs, max_queue_s=settings.max_queue_s or None)
    feeds = Feeds(gateway, channels, dispatcher)

    policy = BrokerPolicy(
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_queue_s=settings.max_queue_s or None,
    )

    def open_model(model: ModelName) -> ModelView:
        broker = RedisBroker(connection, model, policy)
        return ModelView(broker.registry, broker.jobs, prefixes=broker.prefixes)

    roster = Roster(gateway, feeds, RedisModelIndex(connection).models, open_model, metrics)
    dispatcher.attach(roster, feeds)
    canary = Canary(dispatcher, partial(list_targets, roster), proofs, metrics, settings.canary_interval_s)
    under_way = UnderWay(dispatcher.cancel)
    cancels = CancelBoard(RedisNoticeBoard(connection), under_way.cancel)
    laggards = Laggards(dispatcher.streams, settings.max_unread_bytes)
    tasks = [
        asyncio.create_task(roster.watch(), name="roster"),
        asyncio.create_task(canary.watch(), name="canary"),
        asyncio.create_task(cancels.watch(), name="cancels"),
        asyncio.create_task(laggards.watch(), name="laggards"),
    ]
    for task in tasks:
        task.add_done_callback(_tell_of_mistake)
    try:
        yield ClusterEnd(dispatcher, under_way, cancels)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await dispatcher.close()
        await feeds.close()
        await channels.close()
        await connection.close()


def _tell_of_mistake(task: "asyncio.Task[None]") -> None:
    """Log why a task has ended that runs until it is cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s ended by a mistake of ours", task.get_name(), exc_info=error)


def http_settings(settings: GatewayProcessSettings) -> GatewaySettings:
    """Return what the HTTP side is told."""
    return GatewaySettings(
        host=settings.host,
        port=settings.port,
        reuse_port=settings.reuse_port,
        max_body_bytes=settings.max_body_bytes,
        max_concurrent_requests=settings.max_concurrent_requests,
        deadline_s=settings.deadline_s or None,
        vllm_metrics=settings.vllm_metrics,
        open_metrics=settings.open_metrics,
    )


async def _run(settings: GatewayProcessSettings, gateway: GatewayId) -> int:
    app_settings = http_settings(settings)
    files = server_files_of(settings)
    certificates = None if files is None else Certificates(files)
    metrics = GatewayMetrics(CollectorRegistry())
    with StopSignals() as signals:
        async with (
            open_entrance(settings) as entrance,
            open_cluster(gateway, settings, metrics) as cluster,
        ):
            app = create_app(cluster.engine, app_settings, metrics, entrance, cluster.under_way)
            generation = Generation(app[SERVICE], cluster.cancels.cancel)
            credentials = None if certificates is None else certificates.credentials()
            address = RpcAddress(settings.host, settings.rpc_port, settings.reuse_port, credentials)
            async with serve_rpc(generation, app[SERVICE], address) as rpc:
                tls = None if certificates is None else certificates.context
                runner = await _listen(app, settings, cluster.engine.readiness, signals, tls)
                logger.info("listening on %s:%d, for gRPC on port %d", settings.host, port_of(runner), rpc.port)
                settle()
                await signals.stop.wait()
                await close_gently(runner, settings.drain_s, signals, settings.drain_delay_s, rpc.leave)
    await asyncio.to_thread(flush_tracing)
    return 0


async def _listen(
    app: web.Application,
    settings: GatewayProcessSettings,
    readiness: Callable[[], Readiness],
    signals: StopSignals,
    tls: ssl.SSLContext | None,
) -> web.AppRunner:
    listeners = inherit(settings.listen_fds or descriptors_of_systemd(os.environ))
    for listener in listeners:
        settings.refuse_exposure(listener.getsockname()[0])
    runner = await set_up(app)
    if settings.socket_dir is not None:
        await answer_at(runner, own_socket_in(settings.socket_dir, os.getpid()))
    if listeners:
        # Connections wait meanwhile, or another gateway takes them: from us they would get a needless 503.
        await _wait_for(lambda: readiness().is_ready or signals.stop.is_set(), FIRST_READY_S)
        await accept_from(runner, listeners, tls)
    else:
        await listen(runner, settings.host, settings.port, settings.reuse_port, tls)
    return runner


async def _wait_for(holds: Callable[[], bool], limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not holds():  # noqa: ASYNC110 - readiness has no event
                await asyncio.sleep(LOOK_S)


async def close_gently(
    runner: web.AppRunner,
    drain_s: float,
    signals: StopSignals,
    drain_delay_s: float = 0.0,
    leave_rpc: Callable[[], None] = ignore,
) -> None:
    """Drain for up to `drain_s`; a second signal ends the waiting, and what still runs by its error event.

    Either way the process has done what it could and exits 0: it was told to leave, and every request got its end.
    """
    closing = asyncio.create_task(close(runner, drain_s, drain_delay_s, leave_rpc))
    hurry = asyncio.create_task(signals.hurry.wait())
    await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if closing.done():
        await closing
        return
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await close(runner, 0, on_closed=leave_rpc)
