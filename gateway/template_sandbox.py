"""What chat templates run in: the names and filters that `transformers` gives them, and the limits that it does not.

What a template could keep the interpreter busy with, and nothing could interrupt, is refused: see `_Sandbox`. Templates
of models do none of it.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OPERAND = 1_000_000
"""Bits of a number, or items of a text or list, that an operator may make."""


class RefusedByTemplate(jinja2.TemplateError):
    """The template itself says that it cannot render these messages."""


class TemplateTimeout(Exception):
    """Rendering took longer than it may."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for serving it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Operators whose result is far bigger than their operands are bounded: they hold the GIL until they are done.

    Being intercepted they are not computed in advance either, while the template is compiled.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,  # noqa: ANN401 - any value of a template
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute `left operator right`; raises `SecurityError`."""
        if _result_size(operator, left, right) > MAX_OPERAND:
            raise SecurityError(f"the result of {operator} is too big")
        return super().call_binop(context, operator, left, right)


class _Namespace(Namespace):
    """Holds what a template sets, under names that mean nothing to Python."""

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def new_sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment of one template."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _new_namespace
    return environment


def add_checks(tree: nodes.Template, environment: jinja2.Environment, name: str) -> None:
    """Call the function `name` of the context at the start of whatever can be repeated: loops, macros, blocks."""
    repeated: list[nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
        *tree.find_all(nodes.Block),
    ]
    for block in repeated:
        line = block.lineno
        call = nodes.Call(nodes.Name(name, "load", lineno=line), [], [], None, None, lineno=line)
        check = nodes.ExprStmt(call, lineno=line)
        check.set_environment(environment)
        block.body.insert(0, check)


def _result_size(operator: str, left: object, right: object) -> float:
    """Return about how many bits or items the result has."""
    match operator, left, right:
        case "**", int(), int():
            return left.bit_length() * right
        case "*", int(), int():
            return left.bit_length() + right.bit_length()
        case "*", int(), str() | list() | tuple():
            return left * len(right)
        case "*", str() | list() | tuple(), int():
            return len(left) * right
        case _:
            return 0


def _to_json(
    value: Any,  # noqa: ANN401 - any value of a template
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Hugging Face's filter: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_namespace(*values: Any, **attributes: Any) -> Namespace:  # noqa: ANN401 - any value of a template
    given = dict(*values, **attributes)
    for name in given:
        _check_name(name)
    return _Namespace(given)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace holds nothing called {name}")


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplate(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
