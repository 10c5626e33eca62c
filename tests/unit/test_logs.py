"""Log lines: one JSON object each, whatever is logged."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.errors import InvalidSetting
from common.telemetry.logs import JsonFormatter, TextFormatter, request_id, setup_logging

HOSTILE = 'a"}\n{"level":"error"}\r\x1b[31m\x9b31m\u2028\ud800 é'

logger = logging.getLogger("tandem.test")


class Stderr:
    """What has been written to stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self) -> str:
        return self._capsys.readouterr().err

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Stderr]:
    """The logging of before is restored afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.handlers[:] = []  # so that the test runner's own are not closed
    yield Stderr(capsys)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_a_line_has_the_standard_fields(stderr: Stderr) -> None:
    setup_logging("decode-0", "info", fmt="json")
    logger.info("%d pages of %s", 3, "peer")
    (line,) = stderr.lines()
    assert line["time"] == str(line["time"])[:23] + "Z"
    assert (
        line.items()
        >= {
            "level": "info",
            "logger": "tandem.test",
            "message": "3 pages of peer",
            "process": "decode-0",
        }.items()
    )
    assert "request_id" not in line
    assert "exception" not in line


def test_the_level_is_obeyed_and_setting_up_twice_replaces(stderr: Stderr) -> None:
    setup_logging("a", "debug", fmt="text")
    setup_logging("b", "warning", fmt="json")
    logger.info("quiet")
    logger.warning("loud")
    assert [line["message"] for line in stderr.lines()] == ["loud"]


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_client_values_stay_within_their_line(stderr: Stderr, fmt: str) -> None:
    setup_logging("gateway", fmt=fmt)
    logger.info("model %s", HOSTILE, extra={"user": HOSTILE})
    written = stderr.text()
    assert written.count("\n") == 1
    assert written[:-1].isprintable()


def test_json_keeps_client_values_exactly(stderr: Stderr) -> None:
    setup_logging("gateway")
    logger.info("%s", HOSTILE, extra={"user": HOSTILE, "level": "mine", "num_tokens": 3})
    (line,) = stderr.lines()
    assert (line["message"], line["user"], line["level"], line["num_tokens"]) == (HOSTILE, HOSTILE, "info", 3)


async def test_the_request_id_follows_the_task_and_only_it(stderr: Stderr) -> None:
    setup_logging("gateway")

    async def serve(request: str) -> None:
        request_id.set(request)
        await asyncio.sleep(0)
        logger.info("serving %s", request)

    await asyncio.gather(*(serve(f"r{i}") for i in range(20)))
    logger.info("outside")
    logger.info("from a thread", extra={"request_id": "r99"})
    *inside, outside, explicit = stderr.lines()
    assert all(line["message"] == f"serving {line['request_id']}" for line in inside)
    assert len(inside) == 20
    assert "request_id" not in outside
    assert explicit["request_id"] == "r99"


@pytest.mark.parametrize("fmt", ["json", "text"])
def test_exceptions_are_written_with_their_trace(stderr: Stderr, fmt: str) -> None:
    setup_logging("decode-0", fmt=fmt)
    try:
        raise KeyError(HOSTILE)  # noqa: TRY301  # it is what is tested
    except KeyError:
        logger.exception("failed")
    written = stderr.text()
    assert "Traceback" in written
    assert "test_logs.py" in written
    assert all(line.isprintable() for line in written.split("\n"))
    if fmt == "json":
        assert "KeyError" in json.loads(written)["exception"]


def test_objects_that_json_does_not_know_are_named(stderr: Stderr) -> None:
    setup_logging("gateway")
    logger.info("x", extra={"error": ValueError("no")})
    assert stderr.lines()[0]["error"] == "no"


@pytest.mark.parametrize(("level", "fmt"), [("loud", "json"), ("info", "xml"), ("", "json")])
def test_bad_settings_are_refused(level: str, fmt: str) -> None:
    with pytest.raises(InvalidSetting):
        setup_logging("gateway", level, fmt=fmt)


def test_formatters_do_not_change_the_record() -> None:
    record = logging.makeLogRecord({"name": "n", "msg": "a %s", "args": ("b",), "levelname": "INFO"})
    before = dict(record.__dict__)
    JsonFormatter("p").format(record)
    TextFormatter("p").format(record)
    assert record.__dict__ == before


def test_telemetry_loads_no_tensors() -> None:
    modules = ", ".join(f"common.telemetry.{name}" for name in ("logs", "traces", "metrics", "vllm_names", "endpoint"))
    code = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
