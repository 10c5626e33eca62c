"""What a value that a model wrote as plain text is in JSON, by the schema of its function."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.schemas.tools import FunctionDefinition

TEXT = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

MAX_DEPTH = 8
"""Of references and alternatives; a schema that goes deeper says nothing about its type."""

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_NUMBER = re.compile(_INTEGER.pattern + r"(\.\d+)?([eE][+-]?\d+)?")


def types_of_parameter(function: FunctionDefinition, name: str) -> frozenset[str]:
    """Return the types of JSON that a parameter may have; one that the function does not describe is text."""
    parameters = function.parameters or {}
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return TEXT if schema is None else _types_of(schema, parameters, MAX_DEPTH)


def argument_of(written: str, types: frozenset[str]) -> str:
    """Return the JSON of a value of one of `types`; what is of none of them stays the text that it is."""
    value = written.strip()
    word = value.lower()
    if word in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if word in ("true", "false") and "boolean" in types:
        return word
    if ("number" in types and _NUMBER.fullmatch(value)) or ("integer" in types and _INTEGER.fullmatch(value)):
        return value
    if _is_compound(value, types):
        return value
    return json.dumps(written, ensure_ascii=False)


def _is_compound(value: str, types: frozenset[str]) -> bool:
    is_wanted = (value.startswith("{") and "object" in types) or (value.startswith("[") and "array" in types)
    if not is_wanted:
        return False
    try:
        msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _types_of(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY
    match schema:
        case {"type": str(name)}:
            return frozenset({name}) & ANY or ANY
        case {"type": [*names]}:
            return frozenset(name for name in names if isinstance(name, str)) & ANY or ANY
        case {"const": value}:
            return frozenset({_type_of(value)})
        case {"enum": [*values]} if values:
            return frozenset(map(_type_of, values))
        case {"$ref": str(reference)}:
            return _types_of(_referred(reference, root), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), Sequence) and options:
            return frozenset().union(*(_types_of(option, root, depth - 1) for option in options))
    return ANY


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return the part of the schema that `#/...` points to, None if there is none."""
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
