"""What sources become grammars, what those admit, and what is refused with which words."""

import json
from typing import Any

import pytest

from common.errors import InvalidGrammar
from common.grammar.matcher import MAX_MESSAGE_CHARS, compile_matcher
from common.grammar.tokenizer import grammar_tokenizer
from gateway.guidance.source import AnyObject, Choice, ContextFree, JsonSchema, Regex, Source
from gateway.guidance.text import grammar_text
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
VOCABULARY = grammar_tokenizer(CARD.tokenizer, CARD.vocab_size, CARD.eos_ids)
CLOSED = {"additionalProperties": False}
LARK = 'start: word ("," word)*\nword: /[a-z]+/\n'
GBNF = 'root ::= word ("," word)*\nword ::= [a-z]+\n'


def schema(**keywords: Any) -> JsonSchema:
    """Return the source that has these keywords."""
    return JsonSchema(json.dumps(keywords))


def admits(source: Source, text: str) -> bool:
    """Return whether `text` is a whole answer."""
    matcher = compile_matcher(VOCABULARY, grammar_text(source))
    ids = byte_ids(TOKENIZER, text) if text else []
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def complaint(source: Source) -> str:
    """Return why a source is refused."""
    with pytest.raises(InvalidGrammar) as refusal:
        compile_matcher(VOCABULARY, grammar_text(source))
    assert refusal.value.code == "invalid_grammar"
    return refusal.value.message


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (AnyObject(), ["{}", '{"a": [1, -2.5e3, null, {"é": "\\n"}]}', '{\n    "a": true\n}']),
        (schema(type="integer", minimum=3), ["3", "17"]),
        (schema(type="string", minLength=2, maxLength=3), ['"éé"', '"\U0001f600\U0001f600"', '"\\n\\""']),
        (schema(type="object", properties={"b": {}, "a": {}}, required=["a"], **CLOSED), ['{"b":1,"a":2}', '{"a":1}']),
        (schema(type="object", properties={"né": {}}, required=["né"], **CLOSED), ['{"né":1}']),
        (schema(type="object", patternProperties={"^a": {"type": "integer"}}, **CLOSED), ['{"ab":1}']),
        (schema(**{"$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}}), ["true"]),
        (schema(enum=["a", 1, None, {"x": [1]}]), ['"a"', "1", "null", '{"x":[1]}', '{"x": [1]}']),
        (schema(anyOf=[{"type": "null"}, {"type": "array", "maxItems": 1, "items": {"const": 1}}]), ["null", "[1]"]),
        (Regex(r"\d{3}/[a-z]+"), ["123/abc"]),
        (Regex("^(?i)yes|no$"), ["YES", "no"]),
        (Regex(""), [""]),
        (Choice(("yes", 'a "quote"\\\n', "日本", "/x|y/", "")), ["yes", 'a "quote"\\\n', "日本", "/x|y/", ""]),
        (ContextFree(LARK), ["a", "a,bc"]),
        (ContextFree(GBNF), ["a", "a,bc"]),
    ],
)
def test_what_is_admitted(source: Source, texts: list[str]) -> None:
    assert [text for text in texts if not admits(source, text)] == []


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (AnyObject(), ["", "[]", "{} ", " {}", "{  }", '{"a":1', "{'a':1}", '{"a":"\n"}', '{"a":"\\ud800"}']),
        (schema(type="integer", minimum=3), ["2", "3.0", "03", "1e1"]),
        (schema(type="string", minLength=2, maxLength=3), ['"é"', '"abcd"', "ab"]),
        (schema(type="object", properties={"b": {}, "a": {}}, required=["a"], **CLOSED), ['{"b":1}', '{"a":1,"c":1}']),
        (schema(type="object", patternProperties={"^a": {"type": "integer"}}), ['{"ab":"x"}']),
        (Regex(r"\d{3}"), ["12", "1234", "১২৩"]),
        (Choice(("yes", "no")), ["yesno", "ye", "YES"]),
        (ContextFree(LARK), ["", "a,", "A"]),
        (ContextFree(GBNF), ["", "a,", "A"]),
    ],
)
def test_what_is_not_admitted(source: Source, texts: list[str]) -> None:
    assert [text for text in texts if admits(source, text)] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (schema(type="object", properties={"foo": "bar"}), "schema must be an object or boolean"),
        (JsonSchema('{"$ref": "#/definitions/nowhere"}'), "'/definitions/nowhere' does not exist"),
        (JsonSchema('{"$ref": "file:///etc/passwd"}'), "does not fetch"),
        (JsonSchema('{"$ref": "https://example.com/schema.json"}'), "does not fetch"),
        (JsonSchema('{"$ref": "#"}'), "no text can match it"),
        (JsonSchema("[1]"), "must be an object"),
        (JsonSchema('{"type": '), "not readable JSON"),
        (JsonSchema('{"a":' * 100_000), "not readable JSON"),
        (JsonSchema('{"minimum": 1e999}'), "expected value"),
        (schema(type="integer", minimum=5, maximum=3), "Unsatisfiable"),
        (schema(type="sting"), "Invalid type"),
        (schema(type="string", pattern="["), "unclosed"),
        (schema(type="string", pattern="a(?=b)"), "look-around"),
        (schema(type="string", format="postcode"), "Unknown format"),
        (schema(allOf=[{"anyOf": [{"required": [f"{i}{j}"]} for j in "ab"]} for i in range(20)]), "too large"),
        (Regex("["), "unclosed"),
        (Regex("a(?=b)"), "look-around"),
        (Regex(r"(\w)\1"), "backreferences"),
        (Choice(("\ud800",)), "escape"),
        (ContextFree("start: nowhere"), 'unknown name: "nowhere"'),
        (ContextFree("hello"), "neither Lark nor GBNF"),
        (ContextFree('word ::= "a"'), "neither Lark nor GBNF"),
        (ContextFree("root ::= " + "(" * 5000), "neither Lark nor GBNF"),
        (ContextFree("start: start"), "no text can match it"),
    ],
)
def test_b032_what_is_refused(source: Source, words: str) -> None:
    message = complaint(source)
    assert words in message
    assert len(message) <= MAX_MESSAGE_CHARS
    assert "<state>" not in message


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {}},
        {"then": {}},
        {"contains": {}},
        {"minContains": 1},
        {"propertyNames": {"pattern": "a"}},
        {"dependentRequired": {"a": ["b"]}},
        {"dependentSchemas": {}},
        {"dependencies": {}},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": False},
        {"$dynamicRef": "#a"},
    ],
)
@pytest.mark.parametrize("options", [{}, {"x-guidance": {"lenient": True}}], ids=["plain", "with options"])
def test_b032_keywords_that_cannot_be_kept_are_refused(keyword: dict[str, Any], options: dict[str, Any]) -> None:
    (name,) = keyword
    assert name in complaint(JsonSchema(json.dumps({"type": "object", **keyword, **options})))


def test_overlapping_alternatives_of_one_of_are_refused() -> None:
    kinds = [{"type": "object", "properties": {name: {"type": "string"}}} for name in "ab"]
    assert "oneOf" in complaint(schema(oneOf=kinds, **{"x-guidance": {"coerce_one_of": True}}))
    told_apart = [
        {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"], **CLOSED} for name in "ab"
    ]
    assert admits(schema(oneOf=told_apart), '{"kind":"b"}')


def test_a_schema_cannot_loosen_white_space() -> None:
    loose = schema(type="object", **{"x-guidance": {"whitespace_pattern": r"\s*", "whitespace_flexible": True}})
    assert admits(loose, '{ "a": 1}')
    assert not admits(loose, '{  "a": 1}')
