"""Log lines on stderr: one JSON object each, or text for a person at a terminal.

Whatever a client sent is escaped, in both forms: a value can neither start a line of its own nor steer a terminal.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from functools import lru_cache

from common.errors import InvalidSetting

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the current task works for. Threads pass `extra={"request_id": ...}` instead."""

tenant: ContextVar[str] = ContextVar("tenant", default="")
"""The id of the API key that has sent it, "" without one."""

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
    "request_id",
    "tenant",
}
_to_json = json.JSONEncoder(default=str).encode
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logging(process: str, level: str = "info", *, fmt: str = "json") -> None:
    """Send the logs of this process to stderr, replacing what was set up before.

    `process` names it in every line ("decode-0"); `level` is debug, info, warning or error; `fmt` is json or text.
    Raises `InvalidSetting`.
    """
    if level.lower() not in _LEVELS:
        raise InvalidSetting("log_level", level, f"one of {', '.join(_LEVELS)}")
    formatters = {"json": JsonFormatter, "text": TextFormatter}
    if fmt not in formatters:
        raise InvalidSetting("log_format", fmt, f"one of {', '.join(formatters)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[fmt](process))
    logging.basicConfig(level=_LEVELS[level.lower()], handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    logging.logThreads = logging.logMultiprocessing = False  # no line names them
    logging._srcfile = None  # nor the place in the source; the library documents it, and looks for none then


class JsonFormatter(logging.Formatter):
    """Fields: time, level, logger, message, process, pid; if there are any: request_id, tenant, exception, `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Everything beyond ASCII is escaped, control characters of terminals included."""
        line: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": record.process,
        }
        if request := _request_of(record):
            line["request_id"] = request
        if sender := _tenant_of(record):
            line["tenant"] = sender
        line = _extra_of(record) | line
        if exception := _exception_of(self, record):
            line["exception"] = exception
        return _to_json(line)


class TextFormatter(logging.Formatter):
    """Time, level, process, message, request; the exception's lines follow, indented."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and those of its exception."""
        parts = [_time_of(record), record.levelname.lower(), self._process, record.name, record.getMessage()]
        named = {"request_id": _request_of(record), "tenant": _tenant_of(record)}
        fields = {name: value for name, value in named.items() if value} | _extra_of(record)
        line = _printable(" ".join([*parts, *(f"{name}={value}" for name, value in fields.items())]))
        exception = _exception_of(self, record)
        return line + "".join(f"\n    {_printable(text)}" for text in exception.splitlines())


def _time_of(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _request_of(record: logging.LogRecord) -> str:
    return str(record.__dict__.get("request_id") or request_id.get())


def _tenant_of(record: logging.LogRecord) -> str:
    return str(record.__dict__.get("tenant") or tenant.get())


def _extra_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS}


def _exception_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    text = formatter.formatException(record.exc_info) if record.exc_info else ""
    stack = formatter.formatStack(record.stack_info) if record.stack_info else ""
    return "\n".join(part for part in (text, stack) if part)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
