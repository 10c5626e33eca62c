"""The supervisor's unix socket: a running cluster takes orders there, and tells how it carries them out.

A client writes one order as a line of JSON and reads one event per line, `Done` or `Failed` last. Who can open the run
directory may give orders: its owner alone.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from common.errors import InvalidSetting, StartupError
from common.lifecycle.exit_codes import EXIT_CONFIG, EXIT_FAILURE, one_line
from tandem.cluster.events import Failed, Narrator, Restarted
from tandem.cluster.rolling import RollingRestart


class RestartOrder(msgspec.Struct, frozen=True, tag="restart"):
    """Restart these processes (names or roles; none: all but Redis); each must be ready again within `timeout_s`."""

    names: tuple[str, ...]
    timeout_s: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The order has been carried out."""


Reply = Restarted | Done | Failed

_order_decoder = msgspec.json.Decoder(RestartOrder)
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def control_socket_in(run_dir: Path) -> Path:
    """Return where the supervisor of a cluster takes orders."""
    return run_dir / "control.sock"


async def give_order(socket: Path, order: RestartOrder) -> AsyncGenerator[Reply, None]:
    """Yield what the supervisor replies until it has nothing more to say; raises `OSError` if nobody listens."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(msgspec.json.encode(order) + b"\n")
        while line := await reader.readline():
            yield _reply_decoder.decode(line)
    finally:
        writer.close()


class ControlDesk:
    """Takes orders while it is entered, one at a time. Whoever hangs up has the process that is being replaced still
    finished, and no other one begun."""

    def __init__(self, socket: Path, restart: RollingRestart, narrate: Narrator) -> None:
        self._socket = socket
        self._restart = restart
        self._narrate = narrate
        self._is_busy = False
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._take, str(self._socket))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._socket.unlink(missing_ok=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.create_task(self._serve(reader, writer), name="control")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def reply(event: Reply) -> None:
            writer.write(msgspec.json.encode(event) + b"\n")

        try:
            reply(await self._obey(await _line_from(reader), reader.at_eof, reply))
            await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _obey(self, line: bytes, has_left: Callable[[], bool], reply: Callable[[Reply], None]) -> Done | Failed:
        """Carry out one order; return how it ended."""
        if self._is_busy:
            return Failed("a restart is under way already", EXIT_CONFIG)
        self._is_busy = True
        try:
            await self._replace(_order_decoder.decode(line), has_left, reply)
        except (msgspec.DecodeError, InvalidSetting) as error:
            return Failed(one_line(error), EXIT_CONFIG)
        except StartupError as error:
            return Failed(one_line(error), EXIT_FAILURE)
        finally:
            self._is_busy = False
        return Done()

    async def _replace(self, order: RestartOrder, has_left: Callable[[], bool], reply: Callable[[Reply], None]) -> None:
        for child in self._restart.chosen(order.names):
            if has_left():
                return
            restarted = await self._restart.run(child, order.timeout_s)
            self._narrate(restarted)
            reply(restarted)


async def _line_from(reader: asyncio.StreamReader) -> bytes:
    """Return the line that a client has sent; nothing, which is no order, if it is longer than any."""
    try:
        return await reader.readline()
    except ValueError:
        return b""
