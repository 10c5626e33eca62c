"""One connection to Redis on which commands follow each other without waiting for replies.

redis-py's client takes a connection out of its pool for every command and keeps it until the reply is there: 64 callers
hold 64 connections. This uses one of its connections through its public methods (`send_packed_command`,
`read_response`); replies, addresses, passwords and TLS are redis-py's. Commands are packed by hiredis: the 27 arguments
of a placement take redis-py 320 calls.

Replies come in the order of their commands, so the reply of a command that was given up is nobody else's.
"""

import asyncio
import math
from collections import deque
from typing import Any, Final

from hiredis import pack_command
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ResponseError

Argument = str | bytes | int | float


class Pipeline:
    """Owned by a `RedisConnection`; connects when it is needed, and again after a loss.

    `timeout_s` bounds each command, connecting included.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool: Final = pool
        self._timeout_s: Final = timeout_s
        self._link: _Link | None = None
        self._connecting: Final = asyncio.Lock()

    async def call(self, command: tuple[Argument, ...]) -> Any:  # noqa: ANN401 - a reply of the Redis protocol
        """Return the reply; raises what Redis answers, `TimeoutError`, or what is wrong with the connection."""
        link = self._link
        asked_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout_s):
                if link is None or link.is_lost:
                    link = await self._connected()
                return await link.ask(command)
        except TimeoutError:
            if link is not None and link.heard_s <= asked_s:
                link.close(TimeoutError("no answer in time"))  # a new one may reach a Redis that this one does not
            raise

    async def close(self) -> None:
        """Hang up; commands under way fail."""
        async with self._connecting:
            if self._link is not None:
                self._link.close(NotConnected("closed"))
                await self._link.ended()
                self._link = None

    async def _connected(self) -> "_Link":
        """Return the connection; whoever else needs it meanwhile waits for the same one."""
        async with self._connecting:
            if self._link is None or self._link.is_lost:
                self._link = await self._connect()
            return self._link

    async def _connect(self) -> "_Link":
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]  # so it is in redis-py
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return _Link(connection)


class _Link:
    """A connection: whoever asks writes to it, one task reads all replies. Never connects again: replies would be given
    to other commands than their own."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401 - redis-py's, untyped
        self._connection: Final = connection
        self._loop: Final = asyncio.get_running_loop()
        self._awaited: Final[deque[asyncio.Future[Any]]] = deque()
        """The replies to come, in the order of their commands; an error is a result as well."""
        self.heard_s = -math.inf
        """When the last reply came, in the loop's time."""
        self._end: Exception = NotConnected("closed by Redis")
        self._reading: Final = asyncio.create_task(self._read(), name="redis-replies")
        self._reading.add_done_callback(self._lose)

    @property
    def is_lost(self) -> bool:
        """Whether nothing more can be asked."""
        return self._is_over or not self._connection.is_connected

    @property
    def _is_over(self) -> bool:
        """Whether the replies to come are given up."""
        return self._reading.done() or self._reading.cancelling() > 0

    async def ask(self, command: tuple[Argument, ...]) -> Any:  # noqa: ANN401 - a reply of the Redis protocol
        """Return the reply. The link must not be lost; whoever is cancelled while Redis takes nothing in ends it."""
        packed = pack_command(command)  # type: ignore[arg-type]  # it takes tuples of any length
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._awaited.append(reply)
        try:
            await self._connection.send_packed_command(packed, check_health=False)
            answer = await reply
        finally:
            reply.cancel()
            if not self._connection.is_connected:
                self.close(NotConnected("connection lost while a command was sent"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self, reason: Exception) -> None:
        """Hang up; whoever waits for a reply is told the reason."""
        if not self._is_over:
            self._end = reason
            self._reading.cancel()

    async def ended(self) -> None:
        """Wait until the connection is closed."""
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            while True:
                await self._read_reply()
        finally:
            await self._connection.disconnect(nowait=True)

    async def _read_reply(self) -> None:
        try:
            answer = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
        except ResponseError as error:
            answer = error
        self.heard_s = self._loop.time()
        if not self._awaited:
            raise NotConnected(f"a reply that nobody asked for: {answer!r}")
        reply = self._awaited.popleft()
        if not reply.done():
            reply.set_result(answer)

    def _lose(self, reading: "asyncio.Task[None]") -> None:
        error = None if reading.cancelled() else reading.exception()
        reason = self._end if error is None else NotConnected(f"connection lost: {error}")
        while self._awaited:
            reply = self._awaited.popleft()
            if not reply.done():
                reply.set_result(reason)
