"""A client that costs next to nothing: HTTP/1.1 by hand over kept-alive connections, so that what it measures on a
shared machine is the server."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

OK = 200


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion that is asked for. `num_answer_tokens` are generated whatever the model says."""

    tenant: str
    key: str
    prompt: str
    num_answer_tokens: int


@dataclass(frozen=True, slots=True)
class Shot:
    """What became of it. Times are on the performance counter; `head_s` is when the answer's head came, `first_s` the
    first token. `status` None: the connection broke. `is_whole`: the stream ended in order."""

    tenant: str
    sent_s: float
    head_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    status: int | None = None
    retry_after_s: float | None = None
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    is_whole: bool = False
    code: str = ""

    @property
    def is_served(self) -> bool:
        """Whether it was let in."""
        return self.status == OK

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return self.num_prompt_tokens + self.num_answer_tokens


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Client:
    """Asks one address; a connection that is free is used again."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model
        self._idle: deque[Connection] = deque()

    async def fire(self, ask: Ask) -> Shot:
        """Send one request and read all of its answer."""
        connection = await self._connection()
        sent_s = time.perf_counter()
        try:
            connection[1].write(self._request(ask))
            shot = await _read(connection[0], ask.tenant, sent_s)
        except (OSError, EOFError, ValueError) as error:
            connection[1].close()
            return Shot(ask.tenant, sent_s, ended_s=time.perf_counter(), code=type(error).__name__)
        except BaseException:
            connection[1].close()
            raise
        self._idle.append(connection)
        return shot

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _connection(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.popleft()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def _request(self, ask: Ask) -> bytes:
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.num_answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {ask.key}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def _read(reader: asyncio.StreamReader, tenant: str, sent_s: float) -> Shot:
    status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
    head_s = time.perf_counter()
    if "content-length" in headers:
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        retry_after_s = float(headers["retry-after"]) if "retry-after" in headers else None
        code = body.get("error", {}).get("code") or ""
        return Shot(tenant, sent_s, head_s, None, time.perf_counter(), status, retry_after_s, code=code)
    first_s, events = await _events(reader)
    usage, is_whole, code = _outcome(events)
    return Shot(
        tenant,
        sent_s,
        head_s,
        first_s,
        time.perf_counter(),
        status,
        num_prompt_tokens=usage.get("prompt_tokens", 0),
        num_answer_tokens=usage.get("completion_tokens", 0),
        is_whole=is_whole,
        code=code,
    )


def _head(head: bytes) -> tuple[int, Mapping[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in fields}


async def _events(reader: asyncio.StreamReader) -> tuple[float | None, bytes]:
    """Return when the first event came, and all events: they are looked at only then."""
    first_s, kept = None, b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        chunk = (await reader.readexactly(size + 2))[:-2]
        if first_s is None and chunk.startswith(b"data:"):
            first_s = time.perf_counter()
        kept = (kept + chunk)[-2048:]  # what matters stands at the end
    await reader.readexactly(2)
    return first_s, kept


def _outcome(events: bytes) -> tuple[dict[str, int], bool, str]:
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line.startswith(b"data: {")]
    last = json.loads(lines[-1]) if lines else {}
    code = (last.get("error") or {}).get("code") or ""
    return last.get("usage") or {}, events.endswith(b"data: [DONE]\n\n"), code
