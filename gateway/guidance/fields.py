"""From the fields of a request to the one grammar that they ask for, or an `InvalidRequest` that names the field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from common.errors import InvalidGrammar, InvalidRequest
from common.grammar.limits import MAX_GRAMMAR_BYTES
from gateway.guidance.source import Answer, AnyObject, Choice, ContextFree, Embedded, JsonSchema, Regex
from gateway.schemas.grammar import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from gateway.schemas.sampling import SamplingFields
from gateway.served_models import ServedModel, ServedModels


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    """What the answer must match; `param` is the field that said so. `rules` are those of `Embedded`."""

    source: Answer
    param: str
    rules: str = ""

    async def compile(self, model: ServedModel, models: ServedModels, prompt_ids: Sequence[int]) -> str:
        """Return the grammar in llguidance's JSON form; raises `InvalidGrammar` naming the field, or `Unavailable`.

        Here it is the same for every prompt.
        """
        try:
            source = Embedded(self.rules, self.source) if self.rules else self.source
            return await models.grammars.compile(source, model.card)
        except InvalidGrammar as error:
            raise _unusable(self.param, error.message) from error


def requested_grammar(fields: SamplingFields) -> RequestedGrammar | None:
    """Return what the fields ask for, None if any text will do; nothing of it is compiled yet."""
    found = [RequestedGrammar(source, param) for param, source in _sources(fields)]
    match found:
        case []:
            return None
        case [only]:
            return only
        case [first, second, *_]:
            raise InvalidRequest(f"`{second.param}` cannot be combined with `{first.param}`.", param=second.param)
    raise AssertionError(found)


def _sources(fields: SamplingFields) -> Iterator[tuple[str, Answer]]:
    """Yield each field that says something."""
    if fields.response_format is not None:
        yield from _of_format(fields.response_format)
    if (schema := schema_of(fields.guided_json, "guided_json")) is not None:
        yield "guided_json", schema
    if fields.guided_regex is not None:
        yield "guided_regex", Regex(_bounded(fields.guided_regex, "guided_regex"))
    if fields.guided_choice is not None:
        yield "guided_choice", _choice(fields.guided_choice, "guided_choice")
    if fields.guided_grammar is not None:
        yield "guided_grammar", ContextFree(_bounded(fields.guided_grammar, "guided_grammar"))
    if fields.structured_outputs is not None:
        yield from _of_outputs(fields.structured_outputs)


def _of_format(wanted: ResponseFormat) -> Iterator[tuple[str, Answer]]:
    match wanted.type, wanted.json_schema:
        case "text", None:
            return
        case "json_object", None:
            yield "response_format", AnyObject()
        case "json_schema", JsonSchemaFormat(schema=raw):
            param = "response_format.json_schema.schema"
            schema = schema_of(raw, param)
            if schema is None:
                raise InvalidRequest(f"`{param}` must be an object.", param=param)
            yield param, schema
        case "json_schema", None:
            param = "response_format.json_schema"
            raise InvalidRequest(f"`{param}` is missing.", param=param)
        case kind, _:
            param = "response_format.json_schema"
            raise InvalidRequest(f"`{param}` has no meaning in a `response_format` of type {kind}.", param=param)


def _of_outputs(wanted: StructuredOutputs) -> Iterator[tuple[str, Answer]]:
    prefix = "structured_outputs"
    found: list[tuple[str, Answer]] = []
    if (schema := schema_of(wanted.json, f"{prefix}.json")) is not None:
        found.append((f"{prefix}.json", schema))
    if wanted.regex is not None:
        found.append((f"{prefix}.regex", Regex(_bounded(wanted.regex, f"{prefix}.regex"))))
    if wanted.choice is not None:
        found.append((f"{prefix}.choice", _choice(wanted.choice, f"{prefix}.choice")))
    if wanted.grammar is not None:
        found.append((f"{prefix}.grammar", ContextFree(_bounded(wanted.grammar, f"{prefix}.grammar"))))
    if wanted.json_object:
        found.append((f"{prefix}.json_object", AnyObject()))
    if not found:
        raise InvalidRequest(f"`{prefix}` must hold one of json, regex, choice, grammar and json_object.", param=prefix)
    yield from found


def schema_of(raw: msgspec.Raw, param: str) -> JsonSchema | None:
    """Return the schema in a JSON value: an object, or a string that holds one; None for null."""
    try:
        text = _bounded(bytes(raw).decode().strip(), param)
        if text == "null":
            return None
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str).strip()
    except (UnicodeDecodeError, msgspec.DecodeError) as error:  # nobody has looked into it yet
        raise InvalidRequest(f"`{param}` is not valid JSON: {error}.", param=param, code="invalid_json") from error
    if not text.startswith("{"):
        raise InvalidRequest(f"`{param}` must be an object, or a string that holds one.", param=param)
    return JsonSchema(text)


def _choice(options: list[str], param: str) -> Choice:
    _bounded("".join(options), param)
    return Choice(tuple(options))


def _bounded(text: str, param: str) -> str:
    """Return the text, unless nothing as long can be compiled."""
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _unusable(param, f"it takes more than {MAX_GRAMMAR_BYTES} bytes")
    return text


def _unusable(param: str, reason: str) -> InvalidGrammar:
    return InvalidGrammar(f"Invalid `{param}`: {reason}.", param=param)
