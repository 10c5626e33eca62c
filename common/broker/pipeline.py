"""One connection to Redis on which commands follow each other without waiting for replies.

redis-py takes a connection out of its pool for every command and waits for the reply on it, which cost a fifth of a
short request's time in the gateway; this costs a fifth of that. redis-py still makes the connection: it knows about
addresses, passwords and TLS.

Replies come in the order of their commands, so the reply of a command that was given up is nobody else's.
"""

import asyncio
from collections import deque
from typing import Any, Final, cast

from redis.asyncio import ConnectionPool
from redis.exceptions import BusyLoadingError, RedisError
from redis.exceptions import ConnectionError as NotConnected

from common.broker.resp import Argument, MalformedReply, ReplyReader, command_bytes


class Pipeline:
    """Owned by a `RedisConnection`; connects when it is needed, and again after a loss.

    `timeout_s` bounds each command, connecting included.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool: Final = pool
        self._timeout_s: Final = timeout_s
        self._link: _Link | None = None
        self._connecting: asyncio.Task[_Link] | None = None

    async def call(self, command: tuple[Argument, ...]) -> Any:  # noqa: ANN401 - a reply of the Redis protocol
        """Return the reply; raises what Redis answers, `TimeoutError`, or what is wrong with the connection."""
        link = self._link
        if link is None or link.is_lost:
            async with asyncio.timeout(self._timeout_s):
                link = await self._connected()
        reply = await link.ask(command_bytes(command))
        if isinstance(reply, RedisError):
            if isinstance(reply, BusyLoadingError):
                link.close()  # it may be another one that answers next
            raise reply
        return reply

    async def close(self) -> None:
        """Hang up; commands under way fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._link is not None:
            self._link.close()

    async def _connected(self) -> "_Link":
        """Return the connection; whoever else needs it meanwhile waits for the same one."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._forget)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> "_Link":
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]  # so it is in redis-py
        async with asyncio.timeout(self._timeout_s):
            await connection.connect()
        self._link = _Link(connection, self._timeout_s)
        return self._link

    def _forget(self, task: "asyncio.Task[_Link]") -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # raised by whoever waits for it


class _Link(asyncio.Protocol):
    """A connection that was made by redis-py, and is ours from then on."""

    def __init__(self, connection: Any, timeout_s: float) -> None:  # noqa: ANN401 - redis-py's, untyped
        self._connection: Final = connection
        self._timeout_s: Final = timeout_s
        self._loop: Final = asyncio.get_running_loop()
        self._reader: Final = ReplyReader()
        self._pending: Final[deque[tuple[asyncio.Future[Any], float]]] = deque()
        """Whose replies are to come, with the time when the command was sent."""
        self._received_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: Final = cast("asyncio.Transport", connection._writer.transport)  # there is no other way to it
        self._transport.set_protocol(self)
        self.is_lost = self._transport.is_closing()

    def ask(self, command: bytes) -> "asyncio.Future[Any]":
        """Send a command; the future is its reply."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        now = self._loop.time()
        self._pending.append((reply, now))
        self._transport.write(command)
        if self._timer is None:
            self._timer = self._loop.call_at(now + self._timeout_s, self._look)
        return reply

    def data_received(self, data: bytes) -> None:
        self._received_s = self._loop.time()
        try:
            replies = self._reader.feed(data)
        except MalformedReply as error:
            self._lose(NotConnected(str(error)))
            return
        for value in replies:
            reply, _ = self._pending.popleft()
            if not reply.done():
                reply.set_result(value)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(NotConnected(f"connection lost: {error or 'closed by Redis'}"))

    def close(self) -> None:
        """Hang up."""
        self._lose(NotConnected("closed"))

    def _look(self) -> None:
        """Give up the commands whose time is over. Where nothing at all has come since the oldest of them was sent,
        the connection is given up with them: a new one may reach a Redis that this one does not."""
        self._timer = None
        limit_s = self._loop.time() - self._timeout_s
        if self._pending and max(self._received_s, self._pending[0][1]) <= limit_s:
            self._lose(TimeoutError("no answer in time"))
            return
        for reply, sent_s in self._pending:
            if sent_s > limit_s:
                self._timer = self._loop.call_at(sent_s + self._timeout_s, self._look)
                return
            if not reply.done():
                reply.set_exception(TimeoutError("no answer in time"))
        if self._pending:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def _lose(self, error: Exception) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pending:
            reply, _ = self._pending.popleft()
            if not reply.done():
                reply.set_exception(error)
        self._connection._close()  # closes the transport; its `disconnect` would wait for a protocol that is replaced
