"""Chat templates: what they can do, what they cannot, and when they are stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import GenerationFailed, InvalidRequest
from gateway.chat_template import NUM_QUICK, ChatTemplate
from gateway.schemas.tools import FunctionDefinition, Tool
from gateway.tools.request import tool_use
from tests.support.tiny_tokenizer import CHAT_TEMPLATE

HI = [{"role": "user", "content": "hi"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", timeout_s=0.2)


def render(source: str, messages: list[dict[str, Any]] = HI, **kwargs: Any) -> str:
    return template(source).render(messages, kwargs)


def test_a_chat() -> None:
    assert render(CHAT_TEMPLATE) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}", "012"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ tools is none }}", "True"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\na\n  {% endif %}\n", "a\n"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}", "[1]"),
        (
            "{% set ns = namespace(n=0) %}{% for x in [1, 2] if x > 1 %}{% set ns.n = x %}{% endfor %}{{ ns.n }}",
            "2",
        ),
    ],
)
def test_what_templates_expect(source: str, text: str) -> None:
    assert render(source) == text


def test_arguments_reach_the_template_but_replace_nothing() -> None:
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ bos_token }}", bos_token="x") == "<s>"


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


def test_b135_no_way_out_of_the_sandbox(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(GenerationFailed):
        render("{{ lipsum.__globals__['os'].popen('touch " + str(marker) + "').read() }}")
    with pytest.raises(GenerationFailed):
        render("{{ messages.append(1) }}")
    assert not marker.exists()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(n=60) %}{% block b %}{% if ns.n %}{% set ns.n = ns.n - 1 %}"
        "{{ self.b() }}{{ self.b() }}{% set ns.n = ns.n + 1 %}{% endif %}{% endblock %}",
    ],
)
def test_b135_endless_templates_are_stopped(source: str) -> None:
    with pytest.raises(GenerationFailed, match="longer than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 999999999 }}",
        "{% set n = 10 ** 200000 %}{{ n * n }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ (3,) * 10000000000 }}",
    ],
)
def test_b135_nothing_is_computed_that_could_not_be_stopped(source: str) -> None:
    with pytest.raises(GenerationFailed, match="not allowed"):
        render(source)


@pytest.mark.parametrize("source", ["{{ namespace(__x=1) }}", "{% set ns = namespace() %}{% set ns.__x = 1 %}"])
def test_b135_a_namespace_holds_no_names_of_python(source: str) -> None:
    with pytest.raises(GenerationFailed, match="not allowed"):
        render(source)


TOOLS = [Tool("function", FunctionDefinition("f", "does", None, strict=False))]


def test_tools_reach_the_template() -> None:
    use = tool_use(TOOLS, None, None, 0)
    text = template("<tool_call>{{ tools | tojson }}").render(HI, {}, use)
    shown = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {}}}
    assert json.loads(text.removeprefix("<tool_call>")) == [{"type": "function", "function": shown}]


@pytest.mark.parametrize("source", ["<tool_call>", "{{ tools }}", "{{ tools }}<tool_call><function=f>"])
def test_tools_that_the_template_cannot_tell_of_can_only_be_demanded(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(source).render(HI, {}, tool_use(TOOLS, "auto", None, 0))
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
    assert template(source).render(HI, {}, tool_use(TOOLS, "required", None, 0))


@pytest.mark.parametrize("name", ["enable_thinking", "thinking", "reasoning_effort"])
def test_variables_that_the_template_does_not_know_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("x", HI, **{name: "high"})
    assert caught.value.param == name
    assert render("{{ " + name + " }}", HI, **{name: "high"}) == "high"
    assert render("x", HI, **{name: False}) == "x"


@pytest.mark.parametrize("source", ["{{ messages[5].content + 'x' }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"])
def test_other_failures_name_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_a_template_is_trusted_to_be_quick_once_it_has_been_and_until_it_is_not() -> None:
    slow_if_long = template("{% for i in range(messages[0].content | length * 1000) %}{{ i }}{% endfor %}")
    short, long = [{"role": "user", "content": ""}], [{"role": "user", "content": "x" * 10}]
    for _ in range(NUM_QUICK):
        assert not slow_if_long.is_quick
        slow_if_long.render(short, {})
    assert slow_if_long.is_quick
    slow_if_long.render(long, {})
    assert not slow_if_long.is_quick


def test_a_refused_conversation_takes_its_time_too() -> None:
    refusing = template("{{ raise_exception('no') }}")
    for _ in range(NUM_QUICK):
        with pytest.raises(InvalidRequest):
            refusing.render(HI, {})
    assert refusing.is_quick
