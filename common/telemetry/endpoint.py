"""The small HTTP listener of a worker: is it alive, is it ready, what has it counted."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from common.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Whether the process takes work, and in a word why (not). `is_live` False asks for it to be restarted."""

    is_ready: bool
    reason: str = ""
    is_live: bool = True


def health_app(registry: CollectorRegistry, report: Callable[[], HealthReport]) -> web.Application:
    """Return an application with `/health/live`, `/health/ready` (200 or 503) and `/metrics`."""

    async def live(_: web.Request) -> web.Response:
        return _verdict(report().is_live, report().reason)

    async def ready(_: web.Request) -> web.Response:
        return _verdict(report().is_ready, report().reason)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    app = web.Application(client_max_size=1024)
    app.router.add_get("/health/live", live)
    app.router.add_get("/health/ready", ready)
    app.router.add_get("/metrics", metrics)
    return app


def http_logger(name: str) -> logging.Logger:
    """Return a logger for an HTTP server, without the tracebacks that nonsense from anybody would fill it with."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_worth_a_line)
    return logger


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


class HealthServer:
    """Serves a health application on the running event loop from `start` to `close`."""

    def __init__(self, registry: CollectorRegistry, report: Callable[[], HealthReport]) -> None:
        self._runner = web.AppRunner(
            health_app(registry, report), access_log=None, handle_signals=False, logger=http_logger("telemetry.http")
        )

    async def start(self, host: str, port: int = 0) -> int:
        """Listen, port 0 for any; return the port. Raises `InvalidSetting`."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise InvalidSetting("metrics address", f"{host}:{port}", str(error)) from error
        bound: int = self._runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        """Stop listening."""
        await self._runner.cleanup()


async def serve_health(host: str, port: int, registry: CollectorRegistry, report: Callable[[], HealthReport]) -> int:
    """Serve until the process ends; return the port. Who must end it earlier uses `HealthServer`."""
    return await HealthServer(registry, report).start(host, port)


def _verdict(is_good: bool, reason: str) -> web.Response:
    return web.json_response({"ok": is_good, "reason": reason}, status=200 if is_good else 503)
