"""Commands on one connection: each gets its own reply or none, and a connection that is silent is given up."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected

from common.broker.pipeline import Pipeline
from tests.support.polling import until

LONG_S = 10.0
Answer = Callable[["Server", asyncio.StreamWriter, int], Awaitable[None]]


class Server:
    """Calls `answer` for every command, with its number; all commands here are of equal length."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.num_connections = self.num_commands = 0
        self.talks: set[asyncio.Future[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.talks.add(over)
        try:
            while True:
                await reader.readexactly(len(b"*1\r\n$4\r\nPING\r\n"))
                self.num_commands += 1
                await self._answer(self, writer, self.num_commands)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
        finally:
            over.set_result(None)


@asynccontextmanager
async def piped(answer: Answer, timeout_s: float = LONG_S) -> AsyncIterator[tuple[Pipeline, Server]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    pool = ConnectionPool.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), driver_info=None)
    pipeline = Pipeline(pool, timeout_s)
    try:
        yield pipeline, server
    finally:
        await pipeline.close()
        listener.close()
        await asyncio.gather(*server.talks)


def number(n: int) -> bytes:
    return b":%d\r\n" % n


async def test_commands_do_not_wait_for_each_others_replies() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n == 3:
            writer.write(number(1) + number(2) + number(3))

    async with piped(answer) as (pipeline, server):
        assert await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(3))) == [1, 2, 3]
        assert server.num_connections == 1


async def test_the_reply_of_a_cancelled_command_is_nobodys() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n == 2:
            writer.write(number(1) + number(2))

    async with piped(answer) as (pipeline, server):
        given_up = asyncio.create_task(pipeline.call(("PING",)))
        await until(lambda: server.num_commands == 1, "the command", LONG_S)
        given_up.cancel()
        assert await pipeline.call(("PING",)) == 2
        assert server.num_connections == 1


async def test_a_silent_connection_is_given_up_with_all_that_wait_on_it() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if server.num_connections > 1:
            writer.write(number(n))

    async with piped(answer, timeout_s=0.3) as (pipeline, server):
        ends = await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(2)), return_exceptions=True)
        assert [type(end) for end in ends] == [TimeoutError, TimeoutError]
        assert await pipeline.call(("PING",)) == 3
        assert server.num_connections == 2


async def test_a_late_reply_costs_its_own_command_alone() -> None:
    may_answer = asyncio.Event()

    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n == 2:
            await asyncio.sleep(0.2)  # the time that is measured: the connection says something before the limit
            writer.write(number(1))
            await may_answer.wait()
            writer.write(number(2))
        elif n > 2:
            writer.write(number(n))

    async with piped(answer, timeout_s=0.4) as (pipeline, server):
        first, second = (asyncio.create_task(pipeline.call(("PING",))) for _ in range(2))
        assert await first == 1
        with pytest.raises(TimeoutError):
            await second
        may_answer.set()
        assert await pipeline.call(("PING",)) == 3
        assert server.num_connections == 1


async def test_an_answer_that_is_none_of_redis_ends_the_connection() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n")

    async with piped(answer) as (pipeline, _):
        with pytest.raises(NotConnected, match="no reply of Redis"):
            await pipeline.call(("PING",))
