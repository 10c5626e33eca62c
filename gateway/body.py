"""What a client sends, as JSON or as values: taken as a type, or an `InvalidRequest` that names the parameter."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest

DecodedT = TypeVar("DecodedT")

_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

_AT_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD_IN_PROBLEM = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]*)`")
_LAST_INDICES = re.compile(r"(?:\[[\d.]*\])+$")


def decode_json(decoder: msgspec.json.Decoder[DecodedT], body: bytes | msgspec.Raw) -> DecodedT:
    """Return what `decoder` reads; NaN, Infinity and numbers beyond a double are not JSON here."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from error


def typed(fields: Mapping[str, object], kind: type[DecodedT]) -> DecodedT:
    """Return plain values by their names as a struct of that kind."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error


def decode_field(fields: dict[str, msgspec.Raw], name: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the plain value of a top-level field, None if it is absent."""
    if name not in fields:
        return None
    try:
        return decode_json(_any_decoder, fields[name])
    except InvalidRequest as error:
        raise InvalidRequest(f"Invalid `{name}`: {error.message}", param=name, code=error.code) from error


def _invalid(message: str) -> InvalidRequest:
    """Turn msgspec's "<problem> - at `$.path`" into an error that names the parameter."""
    found = _AT_PATH.match(message)
    assert found is not None  # the pattern matches every text
    problem, path = found["problem"], found["path"] or ""
    field = _FIELD_IN_PROBLEM.search(problem)
    if field is not None:
        path = f"{path}.{field['name']}" if path else field["name"]
    param = _LAST_INDICES.sub("", path)
    if not param:
        return InvalidRequest(f"Invalid body: {problem}.")
    return InvalidRequest(f"Invalid `{path}`: {problem}.", param=param)
