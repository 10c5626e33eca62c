"""Reports about features that are not built yet: every input of theirs is refused visibly before anything is generated.

B002 and B014 are about several choices, B010 and B012 about logprobs, B032 about grammars, B034 about KServe.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_server import Gateway, chat_body, running_gateway
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CARD = tiny_card(byte_level_tokenizer())


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


def json_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


CHAT_CASES = [
    pytest.param({"n": 3, "stream": True}, "n", id="b002-three-choices"),
    pytest.param({"n": 4}, "n", id="b014-four-choices"),
    pytest.param({"logprobs": True}, "logprobs", id="b010-alone"),
    pytest.param({"logprobs": True, "top_logprobs": 2}, "logprobs", id="b010-two"),
    pytest.param({"top_logprobs": 2}, "top_logprobs", id="b010-without-logprobs"),
    pytest.param({"top_logprobs": 21}, "top_logprobs", id="b010-too-many"),
    pytest.param({"logprobs": True, "top_logprobs": 5, "top_k": 1}, "logprobs", id="b012-filtered"),
    pytest.param({"logit_bias": {"5": -100}}, "logit_bias", id="b012-banned"),
    pytest.param(json_schema({"properties": {"foo": "bar"}}), "response_format", id="b032-bad-schema"),
    pytest.param(json_schema({"$ref": "#/nowhere"}), "response_format", id="b032-unresolved"),
    pytest.param({"response_format": {"type": "json_schema"}}, "response_format", id="b032-no-schema"),
    pytest.param({"guided_regex": "["}, "guided_regex", id="b032-bad-regex"),
]
TEXT_CASES = [
    pytest.param({"prompt": ["a", "b"], "n": 2}, id="b002-batch"),
    pytest.param({"prompt": ["A", "BB", "CCC"], "n": 2, "echo": True, "max_tokens": 3}, id="b014-batch"),
    pytest.param({"echo": True, "logprobs": 1, "top_k": 1}, id="b012-echo"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_CASES)
async def test_a_chat_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    status, answer = await gateway.post(CHAT, chat_body(**fields))
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
    assert gateway.engine.requests == []


@pytest.mark.parametrize("fields", TEXT_CASES)
async def test_a_completion_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    status, answer = await gateway.post(TEXT, {"model": "tiny", "prompt": "hello"} | fields)
    assert status == 400
    assert answer["error"]["param"] in fields
    assert gateway.engine.requests == []


@pytest.mark.parametrize("shape", ["-1", [-1, 4], [2, 2]])
async def test_b034_kserve_is_no_route_yet(gateway: Gateway, shape: object) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [1, 2, 3]}
    status, answer = await gateway.post("/v2/models/tiny/infer", {"inputs": [tensor]})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert (await gateway.get("/health/ready"))[0] == 200
