"""Chat messages on their way to the template."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from gateway.chat_template import ChatTemplate
from gateway.validation import ChatPrompt, parse_chat


def seen(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = parse_chat(json.dumps({"model": "m", "messages": messages}).encode()).prompts[0]
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
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ("{}", {}),
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


def test_b030_arguments_that_are_no_json_do_not_poison_the_chat() -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    messages = seen(call('{"value": '), {"role": "tool", "tool_call_id": "1", "content": "ok"})
    made = ChatTemplate(template, bos_token="", eos_token="", timeout_s=5)
    assert json.loads(made.render(messages, {})) == '{"value": '


def test_a_tools_answer() -> None:
    parts = [{"type": "text", "text": "20 "}, {"type": "text", "text": "°C"}]
    answer = {"role": "tool", "tool_call_id": "1", "name": "f", "content": parts}
    assert seen(call("{}"), answer)[1] == {"role": "tool", "tool_call_id": "1", "name": "f", "content": "20 °C"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_old_thoughts_reach_the_template(key: str) -> None:
    message = {"role": "assistant", "content": "Yes.", key: "Hm."}
    assert seen(message) == [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "ok"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "ok", "tool_call_id": ""}, "messages[0].tool_call_id"),
        (call("{}") | {"role": "user", "content": "a"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_what_no_history_holds(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        seen(message)
    assert caught.value.param == param


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_b030_absent_content_of_others_is_an_error(role: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        seen({"role": "user", "content": "a"}, {"role": role, "content": None})
    assert caught.value.param == "messages[1].content"


def test_unknown_role() -> None:
    with pytest.raises(InvalidRequest) as caught:
        seen({"role": "robot", "content": "a"})
    assert caught.value.param == "messages[0].role"
