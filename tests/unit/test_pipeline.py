"""Commands on one connection: each gets its own reply or none, and a connection that is silent is given up."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import NoScriptError, ResponseError

from common.broker.pipeline import Pipeline
from tests.support.certificates import Authority
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
async def piped(
    answer: Answer, timeout_s: float = LONG_S, authority: Authority | None = None
) -> AsyncIterator[tuple[Pipeline, Server]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls(authority))
    port = listener.sockets[0].getsockname()[1]
    pipeline = Pipeline(pool_of(port, authority), timeout_s)
    try:
        yield pipeline, server
    finally:
        await pipeline.close()
        listener.close()
        await asyncio.gather(*server.talks)


def tls(authority: Authority | None) -> ssl.SSLContext | None:
    if authority is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.server().configure_cert(context)
    return context


def pool_of(port: int, authority: Authority | None = None) -> ConnectionPool:
    options = {"protocol": 2, "retry": Retry(NoBackoff(), 0), "driver_info": None}
    if authority is None:
        return ConnectionPool.from_url(f"redis://127.0.0.1:{port}/0", **options)
    return ConnectionPool.from_url(f"rediss://127.0.0.1:{port}/0", ssl_ca_data=authority.pem.decode(), **options)


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
        with pytest.raises(NotConnected, match=r"(?i)protocol error"):
            await pipeline.call(("PING",))


async def test_over_tls() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        writer.write(number(n))

    async with piped(answer, authority=Authority()) as (pipeline, server):
        assert await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(64))) == list(range(1, 65))
        assert server.num_connections == 1


async def test_an_error_is_raised_for_its_own_command_alone() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n == 4:
            nested = b"*2\r\n-ERR inside\r\n:7\r\n"
            writer.write(b"-NOSCRIPT No matching script.\r\n" + number(2) + nested + b"-ERR wrong number\r\n")

    async with piped(answer) as (pipeline, server):
        calls = (pipeline.call(("PING",)) for _ in range(4))
        missing, reply, mixed, wrong = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(missing, NoScriptError)
        assert reply == 2
        assert isinstance(mixed, list)
        assert isinstance(mixed[0], ResponseError)
        assert mixed[1] == 7
        assert type(wrong) is ResponseError
        assert str(wrong) == "wrong number"
        assert server.num_connections == 1


async def test_a_reply_that_is_cut_ends_the_connection_and_reaches_nobody() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n == 2:
            writer.write(number(1) + b"$100\r\nhalf")
            writer.close()
        elif n > 2:
            writer.write(number(n))

    async with piped(answer) as (pipeline, server):
        first, second = await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(2)), return_exceptions=True)
        assert first == 1
        assert isinstance(second, NotConnected)
        assert await pipeline.call(("PING",)) == 3
        assert server.num_connections == 2


async def test_replies_of_any_size_in_pieces_of_any_size() -> None:
    large = bytes(range(256)) * (1 << 16)
    reply = b"*4\r\n$%d\r\n%b\r\n$-1\r\n*0\r\n$2\r\n\r\n\r\n" % (len(large), large)

    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        for byte in reply[:14]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)  # each in a write of its own
        writer.write(reply[14:-3])
        await writer.drain()
        writer.write(reply[-3:])

    async with piped(answer) as (pipeline, _):
        assert await pipeline.call(("PING",)) == [large, None, [], b"\r\n"]


async def test_a_reply_that_nobody_asked_for_ends_the_connection() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        writer.write(number(n))
        if server.num_connections == 1:
            await asyncio.sleep(0.05)  # the time that is measured: the first reply has been taken
            writer.write(number(7))

    async with piped(answer) as (pipeline, server):
        assert await pipeline.call(("PING",)) == 1
        await until(lambda: any(talk.done() for talk in server.talks), "the end of the connection", LONG_S)
        assert await pipeline.call(("PING",)) == 2
        assert server.num_connections == 2


async def test_commands_under_way_fail_when_it_is_closed_and_it_can_be_closed_again() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        if n > 2:
            writer.write(number(n))

    async with piped(answer) as (pipeline, server):
        calls = [asyncio.create_task(pipeline.call(("PING",))) for _ in range(2)]
        await until(lambda: server.num_commands == 2, "the commands", LONG_S)
        await asyncio.gather(pipeline.close(), pipeline.close())
        assert [type(end) for end in await asyncio.gather(*calls, return_exceptions=True)] == [NotConnected] * 2
        await pipeline.close()
        assert await pipeline.call(("PING",)) == 3
        assert server.num_connections == 2


async def test_a_caller_that_waits_for_the_connection_is_not_cancelled_with_it() -> None:
    async def answer(server: Server, writer: asyncio.StreamWriter, n: int) -> None:
        writer.write(number(n))

    async with piped(answer) as (pipeline, _):
        connecting, waiting = (asyncio.create_task(pipeline.call(("PING",))) for _ in range(2))
        await asyncio.sleep(0)
        closing = asyncio.create_task(pipeline.close())
        await asyncio.sleep(0)
        connecting.cancel()
        ends = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(ends[0], int | NotConnected)
        await closing
        assert connecting.cancelled()


async def test_a_server_that_takes_nothing_in_holds_nobody_longer_than_the_limit() -> None:
    release = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await release.wait()
        writer.transport.abort()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0, limit=16)
    pipeline = Pipeline(pool_of(listener.sockets[0].getsockname()[1]), timeout_s=0.3)
    calls = (pipeline.call(("SET", "key", bytes(8 << 20))) for _ in range(3))
    ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LONG_S)
    assert all(isinstance(end, TimeoutError | NotConnected) for end in ends)
    await asyncio.wait_for(pipeline.close(), LONG_S)
    release.set()
    listener.close()
    await listener.wait_closed()


async def test_a_connection_whose_password_is_not_answered_is_closed() -> None:
    talks: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(await reader.read())  # until the client hangs up
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}/0"
    pool = ConnectionPool.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), driver_info=None)
    pipeline = Pipeline(pool, timeout_s=0.2)
    with pytest.raises(TimeoutError):
        await pipeline.call(("PING",))
    await until(lambda: bool(talks), "the end of the connection", LONG_S)
    assert b"AUTH" in talks[0]
    assert b"PING" not in talks[0]
    listener.close()
