"""Chat messages on their way to the template."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.validation import ChatPrompt, parse_chat


def seen(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert seen({"role": "user", "content": parts}) == [{"role": "user", "content": "a b"}]


def test_developer_is_system() -> None:
    assert seen({"role": "developer", "content": "x"}) == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"value": ', '{"value": '),
        ("", ""),
        (None, ""),
        ("null", ""),
        ("[]", "[]"),
        ([], "[]"),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_b030_old_arguments(written: object, shown: object) -> None:
    message = seen(call(written), {"role": "tool", "tool_call_id": "1", "content": "ok"})[0]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": shown}


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_b030_absent_content_of_others_is_an_error(role: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        seen({"role": "user", "content": "a"}, {"role": role, "content": None})
    assert caught.value.param == "messages[1].content"


def test_unknown_role() -> None:
    with pytest.raises(InvalidRequest) as caught:
        seen({"role": "robot", "content": "a"})
    assert caught.value.param == "messages[0].role"
