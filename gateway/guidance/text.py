"""From a source to llguidance's JSON form of a grammar. It reads strangers' schemas: in compiler processes alone."""

import json
from typing import Any, assert_never

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from common.errors import InvalidGrammar
from gateway.guidance.source import AnyObject, Choice, ContextFree, Embedded, JsonSchema, Regex, Source

WHITE_SPACE = r"[ ]|\n[ ]{0,20}|\n\t{1,5}"
"""What may stand once between two tokens of JSON: a blank, or a new line and its indentation. Small models love white
space, and without a bound they write nothing else until their tokens are used up."""

JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}
"""All of the options, so that none can be set by a schema. `lenient` would ignore what is not supported."""

ANY_OBJECT = {"type": "object"}


def grammar_text(source: Source) -> str:
    """Return the grammar, not compiled yet; raises `InvalidGrammar` if it cannot even be written."""
    match source:
        case AnyObject():
            return _of_schema(ANY_OBJECT)
        case JsonSchema(schema):
            return _of_schema(_read(schema))
        case Regex(pattern):
            # Only the digits of ASCII: who asks for five digits wants to read a number.
            return _of_lark(f"start: /{regex_to_lark(pattern, 'd')}/")
        case Choice(options):
            return _of_lark("start: " + " | ".join(json.dumps(option) for option in options))
        case ContextFree(text):
            return _of_lark(_as_lark(text))
        case Embedded(rules, answer):
            return _embedded(rules, grammar_text(answer))
        case _:
            assert_never(source)


def _embedded(rules: str, answer: str) -> str:
    """Return the grammar of `rules`, which name the one of the answer."""
    first, *others = json.loads(answer)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**first, "name": "answer"}, *others]})


def _read(schema: str) -> dict[str, Any]:
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"it is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidGrammar("a JSON schema must be an object")
    return value


def _of_schema(schema: dict[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}]})


def _of_lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _as_lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises bare Exception as well
        raise InvalidGrammar(f"it is neither Lark nor GBNF: {error}") from error
