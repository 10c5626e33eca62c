"""Listening: the application on a port or on inherited sockets, with the limits that protect it from its clients."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from common.errors import InvalidSetting
from common.telemetry.endpoint import http_logger
from gateway.api.keys import SERVICE
from gateway.api.malformed import Runner

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 1024
"""Of one header field, and of the request line; more is answered 431 without reading on."""

BACKLOG = 1024
CLOSE_TIMEOUT_S = 1.5
"""What handlers get to write their last event, and again to end after they were cancelled: with the rest of the end it
must fit into the margin that a supervisor leaves beyond the drain time."""


async def serve(
    app: web.Application, host: str, port: int, reuse_port: bool = False, tls: ssl.SSLContext | None = None
) -> web.AppRunner:
    """Listen on an address and return the runner, to be given to `close`; raises `InvalidSetting` if it is taken."""
    runner = await set_up(app)
    await listen(runner, host, port, reuse_port, tls)
    return runner


async def listen(
    runner: web.AppRunner, host: str, port: int, reuse_port: bool = False, tls: ssl.SSLContext | None = None
) -> None:
    """Take clients from an address; raises `InvalidSetting` if it is taken. 0 is any free port."""
    site = web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=reuse_port or None, ssl_context=tls)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidSetting("port", port, f"cannot listen on {host}: {error.strerror}") from error


async def set_up(app: web.Application) -> web.AppRunner:
    """Return the server of `app`, which listens nowhere yet.

    A handler is cancelled as soon as its client is gone, and bodies are never decompressed.
    """
    runner = Runner(
        app,
        access_log=None,
        logger=http_logger("gateway.http"),
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=app[SERVICE].settings.keep_alive_s,
        max_headers=MAX_HEADERS,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        shutdown_timeout=CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    return runner


async def answer_at(runner: web.AppRunner, path: Path) -> None:
    """Answer at a unix socket as well: where several processes share a port, this is how to ask exactly one of them."""
    try:
        await web.UnixSite(runner, path).start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidSetting("socket_dir", str(path.parent), error.strerror or "cannot be used") from error


async def accept_from(
    runner: web.AppRunner, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None = None
) -> None:
    """Take clients from sockets that listen already."""
    for listener in listeners:
        await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=tls).start()


def port_of(runner: web.AppRunner) -> int:
    """Return the port that a running server listens on."""
    port: int = next(address[1] for address in runner.addresses if isinstance(address, tuple))
    return port


def ignore() -> None:
    """Nobody else listens."""


async def close(
    runner: web.AppRunner, grace_s: float, delay_s: float = 0.0, on_closed: Callable[[], None] = ignore
) -> bool:
    """Be not ready, after `delay_s` accept no more connections, let requests end within `grace_s`, stop listening.

    Requests that arrive meanwhile on open connections are served too. `on_closed` is called when no more connections
    are accepted. Returns whether every request came to its own end; the others were ended by an error.
    """
    service = runner.app[SERVICE]
    service.admission.begin_drain()
    await asyncio.sleep(delay_s)
    for site in runner.sites:
        if not isinstance(site, web.UnixSite):  # whoever watches this process may still ask it
            await site.stop()
    on_closed()
    try:
        async with asyncio.timeout(grace_s):
            if runner.server is not None:  # not closed before
                await service.connections.drain(runner.server)
            await service.admission.wait_until_idle()
    except TimeoutError:
        logger.warning("requests are left after %.0f s of draining", grace_s)
    num_cut = service.admission.end()
    await runner.cleanup()
    return num_cut == 0
