"""From the operations and their types to an OpenAPI 3.1 document."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, structs

from gateway.deadline import HEADER as DEADLINE_HEADER
from gateway.deadline import MAX_MS
from gateway.openapi.operation import Operation, reason_of
from gateway.openapi.operations import OPERATIONS
from gateway.request_ids import HEADER as REQUEST_ID_HEADER
from gateway.schemas.errors import ErrorBody
from gateway.version import version

JSON = "application/json"
EVENTS = "text/event-stream"

_Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_REQUEST_ID = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
_RETRY = {"Retry-After": {"$ref": "#/components/headers/RetryAfter"}}


@functools.cache
def document() -> bytes:
    """Return the document as JSON; made once, in some 20 ms."""
    types = [kind for operation in OPERATIONS for kind in operation.types]
    schemas, components = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    schema_of = {id(kind): schema for kind, schema in zip([*types, ErrorBody], schemas, strict=True)}
    requests = _names_within([operation.request for operation in OPERATIONS if operation.request is not None])
    for struct in _structs_of([kind for operation in OPERATIONS for kind in _answers(operation)]):
        if struct.__name__ not in requests:
            components[struct.__name__]["required"] = _always_there(struct)
    paths: dict[str, _Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation, schema_of)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Tandem", "version": version()},
            "servers": [{"url": "/"}],
            "paths": paths,
            "components": {
                "schemas": components,
                "headers": _HEADERS,
                "parameters": _PARAMETERS,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _described(operation: Operation, schema_of: Mapping[int, _Json]) -> _Json:
    described: _Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": [{}] if operation.is_open else [{"key": []}, {}],
        "responses": _responses(operation, schema_of),
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schema_of[id(operation.request)]}},
        }
    if operation.refused:
        described["x-refused-fields"] = {
            name: {"reason": refusal.reason, "unless": list(refusal.harmless)}
            for name, refusal in operation.refused.items()
        }
    return described


def _responses(operation: Operation, schema_of: Mapping[int, _Json]) -> _Json:
    error = schema_of[id(ErrorBody)]
    responses: _Json = {str(status): _response(reason_of(status), {JSON: error}, status) for status in operation.errors}
    if operation.answer is not None or operation.text is not None:
        content = {} if operation.answer is None else {JSON: schema_of[id(operation.answer)]}
        if operation.text is not None:
            content[operation.text] = {"type": "string"}
        if operation.event is not None:
            content[EVENTS] = _event(schema_of[id(operation.event)], None if operation.names_events else error)
        responses["200"] = _response("The answer.", content, 200)
    for status, kind in operation.more.items():
        responses[str(status)] = _response(reason_of(status), {JSON: schema_of[id(kind)]}, status)
    return dict(sorted(responses.items()))


def _event(data: _Json, error: _Json | None) -> _Json:
    """Return one event of a stream. Events without names are followed by `[DONE]`, or by an error and nothing more."""
    json = {"contentMediaType": JSON, "contentSchema": data if error is None else {"anyOf": [data, error]}}
    text = json if error is None else {"anyOf": [{"const": "[DONE]"}, json]}
    return {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string", **text}},
        "required": ["data"],
    }


def _response(description: str, content: Mapping[str, _Json], status: int) -> _Json:
    headers = {**_REQUEST_ID, **(_RETRY if status in (429, 503) else {})}
    return {
        "description": description,
        "headers": headers,
        "content": {kind: {"schema": schema} for kind, schema in content.items()},
    }


def _parameters(operation: Operation) -> list[_Json]:
    names = ["RequestId", *(["Deadline", "Timing"] if operation.generates else [])]
    parameters: list[_Json] = [{"$ref": f"#/components/parameters/{name}"} for name in names]
    if "{model}" in operation.path:
        parameters.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string"}})
    return parameters


def _answers(operation: Operation) -> list[Any]:
    return [kind for kind in operation.types if kind is not operation.request]


def _structs_of(types: Sequence[Any]) -> list[type[msgspec.Struct]]:
    """Return every struct that these types consist of."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType) and info.cls.__name__ not in found:
            found[info.cls.__name__] = info.cls
            waiting += [field.type for field in info.fields]
        elif not isinstance(info, msgspec.inspect.StructType):
            waiting += _parts_of(info)
    return list(found.values())


def _parts_of(info: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    match info:
        case msgspec.inspect.UnionType(types=types):
            return list(types)
        case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
            return [item]
        case msgspec.inspect.TupleType(item_types=items):
            return list(items)
        case msgspec.inspect.DictType(value_type=value):
            return [value]
        case msgspec.inspect.Metadata(type=inner):
            return [inner]
        case _:
            return []


def _names_within(types: Sequence[Any]) -> set[str]:
    return {struct.__name__ for struct in _structs_of(types)}


def _always_there(struct: type[msgspec.Struct]) -> list[str]:
    """Return the fields that an encoded struct has in any case; what it is tagged with is one of them."""
    config = struct.__struct_config__
    tag = [] if config.tag_field is None else [config.tag_field]
    return tag + [
        field.encode_name
        for field in structs.fields(struct)
        if field.default is not UNSET and not (config.omit_defaults and not field.required)
    ]


_HEADERS: Mapping[str, _Json] = {
    "RequestId": {
        "description": "The client's own id if it is short and plain, else the server's.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    "RetryAfter": {"description": "Seconds.", "required": True, "schema": {"type": "integer", "minimum": 1}},
}

_PARAMETERS: Mapping[str, _Json] = {
    "RequestId": {
        "name": REQUEST_ID_HEADER,
        "in": "header",
        "description": "Echoed if it is short and plain.",
        "schema": {"type": "string"},
    },
    "Deadline": {
        "name": DEADLINE_HEADER,
        "in": "header",
        "description": "Milliseconds from arrival that the whole answer may take.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_MS},
    },
    "Timing": {
        "name": "x-tandem-timing",
        "in": "header",
        "description": "`true`: tell where the time went.",
        "schema": {"type": "string"},
    },
}
