"""The grammar of calls: the family's framing around arguments that match their function's schema.

Rules of llguidance's dialect of Lark, for `gateway.chat_grammar` to put together.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import InvalidRequest
from gateway.schemas.tools import FunctionDefinition
from gateway.tools.framing import Framing
from gateway.tools.request import NO_PARAMETERS, Demand, ToolUse

_OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""Arguments look like those that templates show, which are written by `tojson`; and no schema sets any of this."""

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}

_TEXT = r"/(.|\n)*/"
_TEXT_THAT_IS_NO_CALL = r"/(\s*[^\s{](.|\n)*)?/"


def calls_rules(tools: ToolUse, framing: Framing, terminal: Callable[[str], str]) -> list[str]:
    """Return rules for `calls`, at least one; `terminal` writes a marker, be it text or a token of its own.

    Where calls are not demanded, only functions that say `strict` are held to their schemas. Raises `InvalidRequest`
    for a schema that cannot be written.
    """
    rules = [
        *_framing_rules(tools, framing, terminal),
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools.functions))),
    ]
    for index, function in enumerate(tools.functions):
        head = f'{{"name": "{function.name}", "{framing.arguments_key}": '
        rules.append(f'call_{index}: {_text(head)} arguments_{index} "}}"')
        rules.append(
            f"arguments_{index}: %json {_schema(function, is_held=tools.is_forced or function.strict is True)}"
        )
    return rules


def free_rules(framing: Framing, terminal: Callable[[str], str]) -> list[str]:
    """Return rules for `free`: text in which calls may stand, as `calls_rules` has them."""
    opener = terminal(framing.opener)
    if framing.is_bare:
        return [f"free: {opener}? calls | {_TEXT_THAT_IS_NO_CALL}"]
    if opener.startswith('"'):
        return ["free: (announced opened)* text", f"announced[lazy]: {_TEXT} {opener}", f"text: {_TEXT}"]
    return [f"free: text ({opener} opened text)*", f"text: {_TEXT}"]


def _framing_rules(tools: ToolUse, framing: Framing, terminal: Callable[[str], str]) -> list[str]:
    has_more = tools.demand is not Demand.NAMED and tools.max_calls != 1
    if framing.is_list:
        more = f" ({_text(framing.between + ' ')} call)*" if has_more else ""
        return [f"calls: {terminal(framing.opener)} opened", f'opened: "[" call{more} "]"']
    if framing.closer:
        opener = terminal(framing.opener)
        more = f' ("\\n" {opener} opened)*' if has_more else ""
        return [f"calls: {opener} opened{more}", f'opened: "\\n" call "\\n" {terminal(framing.closer)}']
    more = f" ({_text(framing.between + ' ')} call)*" if has_more and framing.between else ""
    return [f"calls: call{more}"]


def _schema(function: FunctionDefinition, *, is_held: bool) -> str:
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    schema = {"type": "object", **parameters} if is_held else _ANY_ARGUMENTS
    try:
        return json.dumps({**schema, "x-guidance": _OPTIONS})
    except RecursionError as error:
        message = f"The `parameters` of the function '{function.name}' are nested too deeply."
        raise InvalidRequest(message, param="tools") from error


def _text(text: str) -> str:
    """Return a string of Lark."""
    return json.dumps(text)
