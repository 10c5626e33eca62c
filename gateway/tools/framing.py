"""How families of models write calls into their answers, told by the chat template that they were trained with."""

import enum
from dataclasses import dataclass


class CallIds(enum.Enum):
    """What the ids of calls look like."""

    OPENAI = enum.auto()
    """`call_` and 24 hexadecimal digits."""
    NINE_CHARACTERS = enum.auto()
    """Nine letters and digits: templates of Mistral's models refuse a history with any other."""


@dataclass(frozen=True, slots=True)
class Framing:
    """The text around calls. Every call is an object with the name and, under `arguments_key`, the arguments.

    `opener` announces calls anywhere in an answer, `closer` may end one. `between` separates calls behind one opener,
    `is_list` puts them into brackets. With `is_bare` an answer may also begin with a call without its opener.
    """

    opener: str = ""
    closer: str = ""
    between: str = ""
    is_list: bool = False
    is_bare: bool = False
    arguments_key: str = "arguments"
    ids: CallIds = CallIds.OPENAI


@dataclass(frozen=True, slots=True)
class FunctionXml:
    """Every call is an element of its own, with one element per argument (see `function_xml`). Only a model that calls
    of its own will writes them; a demanded call is written as `OBJECT`.

    `opener` should announce a call and `closer` end it, but models forget both.
    """

    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    ids: CallIds = CallIds.OPENAI


HERMES = Framing(opener="<tool_call>", closer="</tool_call>")
LLAMA = Framing(opener="<|python_tag|>", between=";", is_bare=True, arguments_key="parameters")
MISTRAL = Framing(opener="[TOOL_CALLS]", between=",", is_list=True, ids=CallIds.NINE_CHARACTERS)
OBJECT = Framing(is_bare=True)
"""The answer is a call and nothing else: for models that are not known to write any, when a grammar makes them."""

FUNCTION_XML = FunctionXml()

_NOT_JSON = ("<function=", "<arg_key>", "[ARGS]")
"""Templates that show these write the arguments in ways of their own, which are not read."""


def framing_of(template: str) -> Framing | FunctionXml | None:
    """Return the family of a chat template's text, None if it shows none that is known."""
    if all(sign in template for sign in ("<function=", "<parameter=", FUNCTION_XML.opener)):
        return FUNCTION_XML
    if any(sign in template for sign in _NOT_JSON):
        return None
    for framing in (MISTRAL, HERMES, LLAMA):
        if framing.opener in template:
            return framing
    return LLAMA if '"parameters": ' in template and '"name": ' in template else None
