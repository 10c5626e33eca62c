"""The ids of a chat are those of `transformers`, whatever writes BOS, and so are the tools and thoughts of families."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.errors import InvalidRequest
from gateway.chat_template import ChatTemplate
from gateway.schemas.tools import FunctionDefinition, Tool
from gateway.tokenizer import ModelTokenizer
from gateway.tools.request import ToolUse, tool_use
from tests.support.family_templates import HERMES, LLAMA, MISTRAL, THINKING
from tests.support.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_tokenizer, tiny_card

pytestmark = pytest.mark.golden

WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
STRICT = (
    "{% for message in messages %}\n"
    "    {% if message.role not in ['system', 'user', 'assistant'] %}\n"
    "        {{- raise_exception('no such role') }}\n"
    "    {% endif %}\n"
    "    {{- message.role | upper }}: {{ message.content | trim | tojson }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}\n"
    "{% if enable_thinking is defined and not enable_thinking %}<t>{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "the 日本 é"}, {"role": "user", "content": "<|im_end|> \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  b < c & 'd'  "},
    ],
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_BOS, STRICT], ids=["plain", "bos", "strict"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", CHATS)
def test_b099_ids_equal_apply_chat_template(
    template: str, kwargs: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    tokenizer = byte_level_tokenizer()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )
    text = ChatTemplate(template, bos_token=BOS, eos_token=EOS, timeout_s=5).render(messages, kwargs)
    assert ModelTokenizer(tiny_card(tokenizer, add_bos=True)).encode_chat(text) == expected


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "<b> & 'é'"},
        "days": {"type": "integer", "default": None},
    },
    "required": ["city"],
}
TOOLS = [
    Tool("function", FunctionDefinition("get_weather", 'How "it" is.\n', WEATHER)),
    Tool("function", FunctionDefinition("now", None, {"type": "object", "properties": {}})),
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "日本 <é>", "days": 2, "x": [None, True, 1.5]}},
}
TOOL_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"rain": "no\\n"}'},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": " hm \n"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm?"},
        {"role": "user", "content": "e"},
    ],
]


@pytest.mark.parametrize("template", [HERMES, THINKING, LLAMA, MISTRAL], ids=["hermes", "thinking", "llama", "mistral"])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", TOOL_CHATS, ids=["short", "tools", "thoughts"])
def test_families_are_rendered_alike(
    template: str, has_tools: bool, kwargs: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    use: ToolUse | None = tool_use(TOOLS, "auto", None, 0) if has_tools else None
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token=BOS, eos_token=EOS)
    expected = reference.apply_chat_template(
        messages,
        tools=None if use is None else [dict(tool) for tool in use.described],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        **kwargs,
    )
    made = ChatTemplate(template, bos_token=BOS, eos_token=EOS, timeout_s=5)
    assert made.render(messages, kwargs, use) == expected


@pytest.mark.parametrize("template", [LLAMA, MISTRAL])
def test_what_a_family_refuses_is_refused(template: str) -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    answer = {"role": "tool", "content": "b", "tool_call_id": "x"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, calls, answer]
    with pytest.raises(InvalidRequest, match=r"one call at a time|nine characters"):
        ChatTemplate(template, bos_token=BOS, eos_token=EOS, timeout_s=5).render(messages, {})
