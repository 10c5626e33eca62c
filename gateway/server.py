"""Listening: the application on a port, with the limits that protect it from its clients."""

from aiohttp import web

from common.errors import InvalidSetting
from common.telemetry.endpoint import http_logger
from gateway.api.keys import SERVICE

MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 1024
"""Of one header field, and of the request line; more is answered 400 without reading on."""

BACKLOG = 1024
CLOSE_TIMEOUT_S = 5.0
"""What handlers get to end after they were cancelled at shutdown."""


async def serve(app: web.Application, host: str, port: int, reuse_port: bool = False) -> web.AppRunner:
    """Start listening and return the runner, to be given to `close`; raises `InvalidSetting` if the port is taken.

    A handler is cancelled as soon as its client is gone, and bodies are never decompressed.
    """
    runner = web.AppRunner(
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
    site = web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=reuse_port or None)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise InvalidSetting("port", port, f"cannot listen on {host}: {error.strerror}") from error
    return runner


def port_of(runner: web.AppRunner) -> int:
    """Return the port that a running server listens on."""
    port: int = runner.addresses[0][1]
    return port


async def close(runner: web.AppRunner, grace_s: float) -> bool:
    """Be not ready, refuse new requests, let the running ones end within `grace_s`, stop listening.

    Returns whether every request came to its own end; the others were ended by an error.
    """
    is_complete = await runner.app[SERVICE].admission.drain(grace_s)
    await runner.cleanup()
    return is_complete
