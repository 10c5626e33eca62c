"""A client with a tiny window that reads as slowly as it likes, or not at all."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

WINDOW_BYTES = 4096


class SlowClient:
    """One request and what was read of its answer."""

    def __init__(self, port: int, body: Mapping[str, Any]) -> None:
        self._port = port
        self._body = json.dumps(body).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        self._socket.setblocking(False)
        self.received = bytearray()
        self.is_over = False
        """Whether the server has closed the connection."""

    async def ask(self) -> None:
        """Connect and send the request; nothing is read."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        await loop.sock_sendall(self._socket, head.encode() + self._body)

    async def read(self, num_bytes: int) -> None:
        """Read what is there, so many bytes at most."""
        part = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)
        self.received += part
        self.is_over = self.is_over or not part

    async def read_all(self) -> None:
        """Read to the end."""
        while not self.is_over:
            await self.read(1 << 16)

    async def read_slowly(self, bytes_per_s: int, until: asyncio.Event) -> None:
        """Read a little every quarter of a second."""
        while not (until.is_set() or self.is_over):
            await self.read(bytes_per_s // 4)
            await asyncio.sleep(0.25)

    @property
    def text(self) -> str:
        """The answer's text, once everything was read."""
        events = [line[6:] for line in self._chunks().split(b"\n\n") if line.startswith(b"data: {")]
        choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def is_whole(self) -> bool:
        """Whether the stream ended in order."""
        return self.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _chunks(self) -> bytes:
        """Return the body without the framing of its chunks."""
        rest, body = bytes(self.received).partition(b"\r\n\r\n")[2], bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body += rest[:length]
            rest = rest[length + 2 :]
        return bytes(body)
