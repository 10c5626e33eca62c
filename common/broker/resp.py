"""The Redis protocol (RESP2): a command as bytes, and replies out of bytes that arrive in pieces of any size."""

from typing import Any

from redis.exceptions import BusyLoadingError, NoScriptError, ReadOnlyError, RedisError, ResponseError

Argument = str | bytes | int | float

_ERRORS: dict[str, type[RedisError]] = {
    "LOADING": BusyLoadingError,
    "NOSCRIPT": NoScriptError,
    "READONLY": ReadOnlyError,
}
_STRING, _ARRAY, _NUMBER, _STATUS = b"$*:+"


class _Incomplete(Exception):
    """More bytes are needed."""


class MalformedReply(Exception):
    """Whoever answers is no Redis."""


def command_bytes(command: tuple[Argument, ...]) -> bytes:
    """Return a command as it is sent."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        value = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(value), value))
    return b"".join(parts)


class ReplyReader:
    """Takes bytes, gives whole replies: bytes, numbers, None, lists of these, or an error that Redis tells of."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, received: bytes) -> list[Any]:
        """Return the replies that are complete with these bytes; raises `MalformedReply`."""
        data = self._held + received if self._held else received
        replies, at = [], 0
        try:
            while at < len(data):
                reply, at = _read(data, at)
                replies.append(reply)
        except _Incomplete:
            pass
        except ValueError as error:
            raise MalformedReply(f"no reply of Redis: {data[at : at + 20]!r}") from error
        self._held = data[at:]
        return replies


def _read(data: bytes, at: int) -> tuple[Any, int]:
    """Return the reply that begins there, and where it ends."""
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        raise _Incomplete
    kind, line, after = data[at], data[at + 1 : line_end], line_end + 2
    if kind == _STRING:
        return _read_string(data, int(line), after)
    if kind == _ARRAY:
        return _read_array(data, int(line), after)
    if kind == _NUMBER:
        return int(line), after
    if kind == _STATUS:
        return line, after
    if data[at : at + 1] == b"-":
        return _error(line.decode(errors="replace")), after
    raise ValueError(kind)


def _read_string(data: bytes, size: int, start: int) -> tuple[bytes | None, int]:
    if size < 0:
        return None, start
    end = start + size
    if len(data) < end + 2:
        raise _Incomplete
    return data[start:end], end + 2


def _read_array(data: bytes, size: int, at: int) -> tuple[list[Any] | None, int]:
    if size < 0:
        return None, at
    items = []
    for _ in range(size):
        item, at = _read(data, at)
        items.append(item)
    return items, at


def _error(text: str) -> RedisError:
    return _ERRORS.get(text.partition(" ")[0], ResponseError)(text)
