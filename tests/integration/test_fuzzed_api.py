"""Whatever is sent to the API as its description allows, or nearly so: no answer is a failure of the server, and every
answer is one that the description knows."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from gateway.deadline import HEADER as DEADLINE
from gateway.openapi.document import document
from tests.support.family_templates import HERMES
from tests.support.gateway_server import running_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, tiny_card
from tests.support.tool_scenes import tokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
TIMEOUT_S = 30.0

schema: Any = schemathesis.openapi.from_dict(json.loads(document()))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway in a thread of its own: what attacks it blocks."""
    started, ends = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        source = tokenizer(special=False)
        engine = ScriptedEngine([tiny_card(source, chat_template=HERMES, max_context=4096)])
        engine.play([*byte_ids(source, "hi"), *(Stop(choice=choice) for choice in range(128))])
        async with running_gateway(engine) as gateway:
            found.extend([gateway.url, asyncio.get_running_loop()])
            started.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(TIMEOUT_S)
    yield found[0]
    found[1].call_soon_threadsafe(ends.set)
    thread.join(TIMEOUT_S)


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.filterwarnings("default")  # of the libraries that make the requests
def test_the_api_is_as_described(case: Any, url: str) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # others are refused early
    if case.path_parameters:
        case.path_parameters["model"] = "tiny"
    if case.headers and re.fullmatch("[1-9][0-9]{0,4}", str(case.headers.get(DEADLINE, ""))):
        case.headers[DEADLINE] = "60000"  # a shorter time would be over, and rightly
    has_unknown_header = case.headers and any("unknown" in name for name in case.headers)  # never refused
    checks = CHECKS if has_unknown_header else [*CHECKS, negative_data_rejection]
    case.call_and_validate(base_url=url, checks=checks, timeout=TIMEOUT_S)
