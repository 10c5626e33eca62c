"""The Redis of a cluster on one host: on the loopback device, behind a password, in memory only."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.broker.overview import Observer
from common.errors import BrokerUnavailable, StartupError
from tandem.cluster.ports import free_port
from tandem.cluster.state import write_private

LOOPBACK = "127.0.0.1"
PROBE_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    """Where the cluster's own Redis listens."""

    port: int
    password: str

    @property
    def url(self) -> str:
        """Address and password in one: a secret."""
        return f"redis://:{self.password}@{LOOPBACK}:{self.port}/0"


def new_embedded_redis() -> EmbeddedRedis:
    """Choose a port and a password."""
    return EmbeddedRedis(free_port(LOOPBACK), secrets.token_hex(24))


def write_config(redis: EmbeddedRedis, file: Path) -> None:
    """Write the server's configuration, which is where its password stands: not in the process list."""
    lines = (
        f"bind {LOOPBACK}",
        f"port {redis.port}",
        f"requirepass {redis.password}",
        "protected-mode yes",
        "daemonize no",
        'save ""',
        "appendonly no",
        "maxmemory-policy noeviction",
        f'dir "{file.parent}"',
    )
    write_private(file, "\n".join((*lines, "")).encode())


async def wait_for_redis(observer: Observer) -> None:
    """Return when the server accepts commands."""
    while not await _answers(observer):  # noqa: ASYNC110 - the state of another process has no event
        await asyncio.sleep(PROBE_INTERVAL_S)


async def require_answer(observer: Observer, url: str) -> None:
    """Raise `StartupError` if Redis does not accept commands; the line names its address, not its password."""
    try:
        await observer.ping()
    except BrokerUnavailable as error:
        reason = str(error.__cause__ or error)
        raise StartupError(f"no usable Redis at {shown_address(url)}: {reason}") from error


def shown_address(url: str) -> str:
    """Return where `url` points, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2] or urlsplit(url).path


async def _answers(observer: Observer) -> bool:
    try:
        await observer.ping()
    except BrokerUnavailable:
        return False
    return True
