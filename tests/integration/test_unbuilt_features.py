"""What clients of such systems ask for and this one does not have: refused visibly before anything is generated."""

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


SHARED: list[dict[str, Any]] = [
    {"use_beam_search": True},
    {"length_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"truncate_prompt_tokens": 5},
    {"add_special_tokens": False},
]
CHAT_CASES: list[dict[str, Any]] = [
    *SHARED,
    {"best_of": 2},
    {"echo": True},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}},
    {"web_search_options": {}},
    {"continue_final_message": True},
]
TEXT_CASES: list[dict[str, Any]] = [
    *SHARED,
    {"suffix": "x"},
    {"prompt_embeds": "x"},
    {"top_logprobs": 1},
    {"chat_template_kwargs": {"enable_thinking": True}},
]


@pytest.mark.parametrize("fields", CHAT_CASES)
async def test_a_chat_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    [param] = fields
    status, answer = await gateway.post(CHAT, chat_body(**fields))
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
    assert gateway.engine.requests == []


@pytest.mark.parametrize("fields", TEXT_CASES)
async def test_a_completion_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    [param] = fields
    status, answer = await gateway.post(TEXT, {"model": "tiny", "prompt": "hello"} | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.engine.requests == []


@pytest.mark.parametrize("shape", ["-1", [-1, 4], [2, 2]])
async def test_b034_kserve_is_no_route_yet(gateway: Gateway, shape: object) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [1, 2, 3]}
    status, answer = await gateway.post("/v2/models/tiny/infer", {"inputs": [tensor]})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert (await gateway.get("/health/ready"))[0] == 200
