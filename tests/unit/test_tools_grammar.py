"""The grammar of demanded calls, and of thoughts before them, whatever kind of tokens the markers are."""

from collections.abc import Callable

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from common.errors import InvalidRequest
from common.grammar.tokenizer import grammar_tokenizer
from gateway.guidance.source import ContextFree, Embedded, JsonSchema, Source
from gateway.guidance.text import grammar_text
from gateway.reasoning import Markers, thoughts_rules
from gateway.schemas.tools import FunctionDefinition, Tool
from gateway.tokenizer import ModelTokenizer
from gateway.tools.framing import HERMES, LLAMA, MISTRAL, OBJECT, Framing
from gateway.tools.grammar import calls_rules, free_rules
from gateway.tools.request import tool_use
from tests.support.tiny_tokenizer import byte_level_tokenizer, tiny_card

THINK = Markers("<think>", "</think>")
SQUARE = Markers("[THINK]", "[/THINK]")
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>", "[THINK]", "[/THINK]")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [Tool("function", FunctionDefinition("f", parameters=SCHEMA)), Tool("function", FunctionDefinition("g"))]

F, G = '{"name": "f", "KEY": {"a": 1}}', '{"name": "g", "KEY": {}}'
FRAMED = {
    "hermes": (HERMES, "<tool_call>\n", "\n</tool_call>", "\n<tool_call>\n"),
    "llama": (LLAMA, "", "", "; "),
    "mistral": (MISTRAL, "[TOOL_CALLS][", "]", ", "),
}


class Workshop:
    """A tokenizer whose markers are of one kind, and the grammars that are made for it."""

    def __init__(self, kind: str) -> None:
        self._tokenizer = byte_level_tokenizer()
        tokens = [AddedToken(text, special=kind == "special") for text in MARKERS]
        add: Callable[[Tokenizer], object] = {
            "text": lambda _: None,
            "added": lambda made: made.add_tokens(tokens),
            "special": lambda made: made.add_special_tokens(tokens),
        }[kind]
        add(self._tokenizer)
        self._card = tiny_card(self._tokenizer)
        self.terminal = ModelTokenizer(self._card).lark_terminal

    def admits(self, source: Source, text: str) -> bool:
        """Whether the model may write `text` and end."""
        vocabulary = grammar_tokenizer(self._card.tokenizer, self._card.vocab_size, self._card.eos_ids)
        matcher = LLMatcher(vocabulary, grammar_text(source))
        assert not matcher.is_error(), matcher.get_error()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def calls(self, framing: Framing, *, is_parallel: bool = True) -> Source:
        use = tool_use(TOOLS, "required", is_parallel, 0)
        assert use is not None
        return ContextFree(lark("start: calls", *calls_rules(use, framing, self.terminal)))

    def free(self, framing: Framing) -> Source:
        """Text with calls, of which those of the first function are held to its schema."""
        strict = Tool("function", FunctionDefinition("f", parameters=SCHEMA, strict=True))
        use = tool_use([strict, TOOLS[1]], "auto", None, 0)
        assert use is not None
        rules = calls_rules(use, framing, self.terminal) + free_rules(framing, self.terminal)
        return ContextFree(lark("start: free", *rules))

    def behind_thoughts(self, answer: JsonSchema, markers: Markers, *, is_open: bool) -> Source:
        rules = thoughts_rules(markers, is_open=is_open, terminal=self.terminal)
        return Embedded(lark("start: thoughts @answer", *rules), answer)


def lark(*rules: str) -> str:
    return "\n".join([*rules, ""])


@pytest.fixture(params=["text", "added", "special"])
def workshop(request: pytest.FixtureRequest) -> Workshop:
    return Workshop(request.param)


@pytest.mark.parametrize("family", FRAMED)
def test_calls_of_a_family(workshop: Workshop, family: str) -> None:
    framing, before, behind, between = FRAMED[family]
    f, g = (text.replace("KEY", framing.arguments_key) for text in (F, G))
    more = behind + between if framing.closer else between
    grammar = workshop.calls(framing)
    for good in (f, g, f + more + g, g + more + g + more + f):
        assert workshop.admits(grammar, before + good + behind)
        assert workshop.admits(workshop.calls(framing, is_parallel=False), before + good + behind) == (good in (f, g))
    for bad in ("", "x", f.replace("1", '"x"'), f.replace('"a": 1', ""), f.replace('"f"', '"h"'), f + " ", f + f):
        assert not workshop.admits(grammar, before + bad + behind)
    assert not workshop.admits(grammar, "")
    assert not workshop.admits(grammar, "x")


@pytest.mark.parametrize("family", FRAMED)
def test_a_model_that_need_not_call_is_held_to_strict_schemas(workshop: Workshop, family: str) -> None:
    framing, before, behind, between = FRAMED[family]
    f, g = (text.replace("KEY", framing.arguments_key) for text in (F, G))
    more = behind + between if framing.closer else between
    other = g.replace("{}", '{"any": [1]}')
    grammar = workshop.free(framing)
    for good in ("", "It rains.\n", " 東京", before + f + behind, before + other + more + f + behind):
        assert workshop.admits(grammar, good)
    for bad in (f.replace("1", '"x"'), f.replace('"f"', '"h"'), other + more + f.replace('"a": 1', "")):
        assert not workshop.admits(grammar, before + bad + behind)
    if not framing.is_bare:
        assert workshop.admits(grammar, "Look: " + before + f + behind + " So?")
        assert not workshop.admits(grammar, "Look: " + before + f.replace("1", "{}") + behind)


def test_an_object(workshop: Workshop) -> None:
    assert workshop.admits(workshop.calls(OBJECT), F.replace("KEY", "arguments"))
    assert not workshop.admits(workshop.calls(OBJECT), F.replace("KEY", "parameters"))


@pytest.mark.parametrize("markers", [THINK, SQUARE], ids=["angle", "square"])
def test_thoughts_before_an_answer(workshop: Workshop, markers: Markers) -> None:
    answer = JsonSchema('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    text = '{"a": 1}'
    thoughts = f"Hm, <b> 東京 {{\n{markers.closer}\n\n"
    opened = workshop.behind_thoughts(answer, markers, is_open=True)
    free = workshop.behind_thoughts(answer, markers, is_open=False)
    assert workshop.admits(opened, thoughts + text)
    assert workshop.admits(opened, markers.closer + text)
    assert not workshop.admits(opened, text)
    assert not workshop.admits(opened, thoughts + "no")
    assert not workshop.admits(opened, thoughts + "\n" * 9 + text)
    assert workshop.admits(free, text)
    assert workshop.admits(free, markers.opener + thoughts + text)
    assert not workshop.admits(free, thoughts + text)
    assert not workshop.admits(free, markers.opener + thoughts)


def test_no_schema_loosens_its_own_rules(workshop: Workshop) -> None:
    schema = {**SCHEMA, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    use = tool_use([Tool("function", FunctionDefinition("f", parameters=schema))], "required", None, 0)
    assert use is not None
    grammar = ContextFree(lark("start: calls", *calls_rules(use, OBJECT, workshop.terminal)))
    assert workshop.admits(grammar, '{"name": "f", "arguments": {"a": 1}}')
    assert not workshop.admits(grammar, '{"name": "f", "arguments": {  "a": 1}}')


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name() -> None:
    """It may have been read where there was more room for nesting."""
    nested: dict[str, object] = {}
    for _ in range(2000):
        nested = {"properties": {"a": nested}}
    function = FunctionDefinition("deep", parameters=nested)
    use = tool_use([Tool("function", function)], "required", None, 0)
    assert use is not None
    with pytest.raises(InvalidRequest, match="'deep' are nested too deeply") as caught:
        calls_rules(use, HERMES, repr)
    assert caught.value.param == "tools"
