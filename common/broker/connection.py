"""The way to Redis: one deadline per command, no retries, no reply given to another command than its own.

Commands share a connection (`Pipeline`); each blocking read has one of its own. redis-py 8 would retry ten times by
itself and time out each socket read; both are off. The deadline stands around the whole command, connecting included.
When it or a cancellation strikes a blocking read while its reply is outstanding, redis-py closes that connection. Who
waits for Redis to come back is the caller (`backoff`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError

from common.broker.pipeline import Argument, Pipeline
from common.broker.scripts import Script
from common.errors import BrokerUnavailable, InvalidSetting

COMMAND_TIMEOUT_S = 1.0

_MAX_CONNECTIONS = 1 << 16  # each blocking read has an owner that awaits it
_MENDABLE = ("NOGROUP", "UNBLOCKED")


class RedisConnection:
    """Connections to one Redis: one for commands, others for blocking reads. Connects when first used."""

    def __init__(self, url: str, *, command_timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self._command_timeout_s: Final = command_timeout_s
        self._blocking = _client(url, command_timeout_s)
        self._commands = Pipeline(self._blocking.connection_pool, command_timeout_s)

    async def call(self, *command: Argument) -> Any:  # noqa: ANN401 - a reply of the Redis protocol, each caller knows its own
        """Return the reply to a command; raise `BrokerUnavailable`."""
        try:
            return await self._commands.call(command)
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error

    async def run(self, script: Script, keys: Sequence[str], *arguments: Argument) -> Any:  # noqa: ANN401 - as `call`
        """Return the answer of a script; raise `BrokerUnavailable`."""
        try:
            return await self.call("EVALSHA", script.digest, len(keys), *keys, *arguments)
        except BrokerUnavailable as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await self.call("EVAL", script.source, len(keys), *keys, *arguments)

    async def read(self, block_s: float, command: str, *options: Argument, streams: Sequence[Argument]) -> Any:  # noqa: ANN401 - as `call`
        """Run XREAD or XREADGROUP, waiting up to `block_s` for entries; return None if none came.

        Raise `StreamVanished` when stream or group are missing, `BrokerUnavailable` otherwise.
        """
        blocking: tuple[Argument, ...] = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        try:
            async with asyncio.timeout(self._command_timeout_s + max(0.0, block_s)):
                command_line = (command, *options, *blocking, "STREAMS", *streams)
                return await self._blocking.execute_command(*command_line)  # type: ignore[no-untyped-call]  # as above
        except ResponseError as error:
            if str(error).startswith(_MENDABLE):
                raise StreamVanished(str(error)) from error
            raise await self._translated(error) from error
        except (RedisError, OSError, TimeoutError) as error:
            raise await self._translated(error) from error

    async def close(self) -> None:
        """Close every connection; commands under way fail."""
        await self._commands.close()
        await self._blocking.aclose()

    async def _translated(self, error: Exception) -> BrokerUnavailable:
        if isinstance(error, ReadOnlyError):  # the primary is another one now: resolve its name again
            await self._commands.close()
            await self._blocking.connection_pool.disconnect(inuse_connections=False)
        return BrokerUnavailable(f"Redis is unavailable: {str(error) or type(error).__name__}")


class StreamVanished(BrokerUnavailable):
    """Stream or consumer group are gone, e.g. after a restart without persistence; the reader makes them anew."""


def _client(url: str, connect_timeout_s: float) -> Redis:
    try:
        pool = ConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            protocol=2,  # plain replies and no push messages
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=connect_timeout_s,
            driver_info=None,
        )
    except ValueError as error:
        raise InvalidSetting("redis_url", "(not shown)", str(error)) from error
    client = Redis.from_pool(pool)
    client.response_callbacks.clear()  # replies as the protocol has them
    return client
