"""One compiler process, as its gateway sees it: orders in, answers out, and an end that no grammar can delay."""

import asyncio
import os
import socket
import subprocess
import sys
from asyncio import StreamReader, StreamWriter

import msgspec

from gateway.guidance.orders import (
    LENGTH_BYTES,
    Compile,
    Compiled,
    Load,
    Order,
    Refused,
    Reply,
    Unknown,
    Unusable,
    frame,
    reply_decoder,
)

PROGRAM = "gateway.guidance.compiler_process"

LOAD_S = 60.0
"""An idle machine starts the process in 0.2 s and loads a tokenizer in 0.2 to 1 s."""


class CompilerLost(Exception):
    """The process has ended, or is too late with its answer: nothing more can be asked of it."""


class Compiler:
    """Obeys one order at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", reader: StreamReader, writer: StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._has_answered = False

    @classmethod
    async def start(cls) -> "Compiler":
        """Start a process; raises `OSError` if the system cannot have one more."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _spawn(theirs)
            except OSError:
                ours.close()
                raise
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def compile(self, order: Compile, vocabulary: Load, limit_s: float) -> Compiled | Refused | Unusable:
        """Return what became of `order`, for which there are `limit_s`; raises `CompilerLost`."""
        reply = await self._ask(order, limit_s if self._has_answered else LOAD_S)
        if isinstance(reply, Unknown):
            loaded = await self._ask(vocabulary, LOAD_S)
            if isinstance(loaded, Unusable):
                return loaded
            reply = await self._ask(order, limit_s)
        assert isinstance(reply, Compiled | Refused), reply
        return reply

    async def close(self) -> None:
        """End the process, whatever it does."""
        self._writer.close()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def _ask(self, order: Order, limit_s: float) -> Reply:
        try:
            async with asyncio.timeout(limit_s):
                self._writer.write(frame(order))
                await self._writer.drain()
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
                reply = reply_decoder.decode(await self._reader.readexactly(length))
        except TimeoutError as error:
            raise CompilerLost(f"no answer within {limit_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            raise CompilerLost("its process has ended") from error
        self._has_answered = True
        return reply


def _spawn(connection: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the program with `connection` as its input.

    Not by the event loop's own means, which fork the whole process, threads of gRPC and all. A session of its own: what
    a terminal sends is for the gateway to handle.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(os.getpid())],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # the library's complaints quote grammars
        start_new_session=True,
    )
