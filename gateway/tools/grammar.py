"""The grammar of an answer that must call: the family's framing around arguments that match their function's schema.

Written in llguidance's dialect of Lark.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

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


def calls_grammar(tools: ToolUse, framing: Framing, terminal: Callable[[str], str]) -> str:
    """Return the grammar; `terminal` writes a marker, be it text or a token of its own."""
    rules = [
        f"start: {_calls(tools, framing, terminal)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools.functions))),
    ]
    for index, function in enumerate(tools.functions):
        rules.append(f"call_{index}: {_call(function, framing, index, terminal)}")
        rules.append(f"arguments_{index}: %json {_schema(function)}")
    return "\n".join([*rules, ""])


def _calls(tools: ToolUse, framing: Framing, terminal: Callable[[str], str]) -> str:
    has_more = tools.demand is Demand.REQUIRED and tools.max_calls != 1
    if framing.is_list:
        more = f" ({_text(framing.between + ' ')} call)*" if has_more else ""
        return f'{terminal(framing.opener)} "[" call{more} "]"'
    separator = f"{framing.between} " if framing.between else "\n"
    is_repeatable = bool(framing.between or framing.closer)
    return f"call ({_text(separator)} call)*" if has_more and is_repeatable else "call"


def _call(function: FunctionDefinition, framing: Framing, index: int, terminal: Callable[[str], str]) -> str:
    head = f'{{"name": "{function.name}", "{framing.arguments_key}": '
    if not framing.closer:
        return f'{_text(head)} arguments_{index} "}}"'
    opener, closer = terminal(framing.opener), terminal(framing.closer)
    return f"{opener} {_text(chr(10) + head)} arguments_{index} {_text('}' + chr(10))} {closer}"


def _schema(function: FunctionDefinition) -> str:
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return json.dumps({"type": "object", **parameters, "x-guidance": _OPTIONS})


def _text(text: str) -> str:
    """Return a string of Lark."""
    return json.dumps(text)
