"""From request fields to the one grammar that they ask for."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.grammar.limits import MAX_GRAMMAR_BYTES
from gateway.guidance.fields import RequestedGrammar, requested_grammar
from gateway.guidance.source import Answer, AnyObject, Choice, ContextFree, JsonSchema, Regex
from gateway.schemas.sampling import SamplingFields
from gateway.validation import parse_completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA)
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def asked(**fields: Any) -> RequestedGrammar | None:
    """Return what a completion request with these fields asks for."""
    body = json.dumps({"model": "m", "prompt": "p"} | fields).encode()
    sampling = parse_completion(body).sampling
    assert isinstance(sampling, SamplingFields)
    return requested_grammar(sampling)


@pytest.mark.parametrize(
    ("fields", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, AnyObject(), "response_format"),
        ({"response_format": FORMAT}, JsonSchema(SCHEMA_TEXT), "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, JsonSchema(SCHEMA_TEXT), "guided_json"),
        ({"guided_json": SCHEMA_TEXT}, JsonSchema(SCHEMA_TEXT), "guided_json"),
        ({"guided_regex": "a+"}, Regex("a+"), "guided_regex"),
        ({"guided_choice": ["a", "b"]}, Choice(("a", "b")), "guided_choice"),
        ({"guided_grammar": 'root ::= "a"'}, ContextFree('root ::= "a"'), "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA_TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, Regex("a"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Choice(("a",)), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, ContextFree("start: /a/"), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, AnyObject(), "structured_outputs.json_object"),
        (
            {"structured_outputs": {"regex": "a", "json": None, "disable_fallback": False, "whitespace_pattern": None}},
            Regex("a"),
            "structured_outputs.regex",
        ),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, Regex("a"), "guided_regex"),
    ],
)
def test_what_is_asked_for(fields: dict[str, Any], source: Answer, param: str) -> None:
    assert asked(**fields) == RequestedGrammar(source, param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "guided_regex": None, "structured_outputs": None},
        {"guided_decoding_backend": "auto"},
    ],
)
def test_any_text_will_do(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": None}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "not a schema"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_b032_what_is_malformed_or_in_conflict_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        asked(**fields)
    assert (refusal.value.param or "").endswith(param)


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_what_is_too_long_to_be_compiled_is_refused_at_once(name: str) -> None:
    text = "a" * (MAX_GRAMMAR_BYTES + 1)
    values = {"guided_json": {"title": text}, "guided_choice": ["b", text]}
    with pytest.raises(InvalidRequest, match=str(MAX_GRAMMAR_BYTES)) as refusal:
        asked(**{name: values.get(name, text)})
    assert (refusal.value.param, refusal.value.code) == (name, "invalid_grammar")


@pytest.mark.parametrize(
    "fields",
    [
        b'"guided_json": {"a": "\xff"}',
        b'"guided_json": "{\xff}"',
        b'"structured_outputs": {"json": {"\xff": 1}}',
        b'"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "\xff"}}}',
    ],
)
def test_a_schema_that_is_no_text_is_refused_by_name(fields: bytes) -> None:
    refused = parse_body(b'{"model": "m", "prompt": "p", ' + fields + b"}")
    assert refused.value.param is not None
    assert fields.startswith(b'"' + refused.value.param.split(".")[0].encode())
    assert "not valid JSON" in refused.value.message


def parse_body(body: bytes) -> pytest.ExceptionInfo[InvalidRequest]:
    """Return why the body is refused."""
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(body)
    return caught
