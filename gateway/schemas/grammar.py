"""The request fields that say what an answer must match: OpenAI's `response_format`, vLLM's `guided_*` and
`structured_outputs`. A `msgspec.Raw` holds any JSON value, not looked into: schemas are read by compiler processes.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

MAX_OPTIONS = 4096


def null() -> msgspec.Raw:
    """Return what stands for a JSON value that a client did not send."""
    return msgspec.Raw(b"null")


NonEmpty = Annotated[str, Meta(min_length=1)]
Options = Annotated[list[str], Meta(min_length=1, max_length=MAX_OPTIONS)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema and what to call it. It is enforced whether it is `strict` or not."""

    schema: msgspec.Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the first five. The others are there for clients that send all of their defaults."""

    json: msgspec.Raw = field(default_factory=null)
    regex: NonEmpty | None = None
    choice: Options | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None
