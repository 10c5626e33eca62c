"""What an answer must match, as a client said it. Sources are values: equal ones are compiled once."""

import msgspec


class AnyObject(msgspec.Struct, frozen=True, tag="any_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """JSON that a schema admits; `schema` is its JSON text, not read yet. Keys come in the order of the schema."""

    schema: str


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A text that matches from its beginning to its end."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of some texts."""

    options: tuple[str, ...]


class ContextFree(msgspec.Struct, frozen=True, tag="context_free"):
    """A text that a grammar derives, written in Lark's syntax (with a rule called `start`) or in GBNF (`root`)."""

    text: str


Answer = AnyObject | JsonSchema | Regex | Choice | ContextFree


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    """An answer with other text around or instead of it; `rules` are Lark with `@answer` where it may stand."""

    rules: str
    answer: Answer


Source = Answer | Embedded
