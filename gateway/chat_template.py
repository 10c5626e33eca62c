"""A model's chat template: compiled once, rendered in a sandbox, stopped at a deadline.

A template comes with the model's files, so it is not trusted: it runs in jinja2's immutable sandbox, and every turn of
its loops and macros looks at the clock (a thread cannot be killed from outside).
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import GenerationFailed, InvalidRequest
from gateway.messages import TemplateMessage

_CHECK = "tandem_check_deadline"


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


class ChatTemplate:
    """Renders conversations for one model. May be used from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile `source`; raises `jinja2.TemplateSyntaxError`."""
        environment = _environment()
        tree = environment.parse(source)
        _add_deadline_checks(tree, environment)
        self._template = environment.from_string(tree)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._timeout_s = timeout_s
        self._clock = clock

    def render(self, messages: Iterable[TemplateMessage], kwargs: Mapping[str, Any]) -> str:
        """Return the prompt that asks for the assistant's next turn.

        Raises `InvalidRequest` if the template refuses the messages, `GenerationFailed` if the template is at fault.
        """
        variables = {
            **kwargs,
            **self._tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            _CHECK: self._deadline_check(),
        }
        try:
            return self._template.render(variables)
        except RefusedByTemplate as error:
            raise InvalidRequest(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except SecurityError as error:
            raise GenerationFailed("The model's chat template does something that is not allowed.") from error
        except TemplateTimeout as error:
            raise GenerationFailed(f"The model's chat template took longer than {self._timeout_s} s.") from error
        except Exception as error:  # a template is a program: it can fail in every way
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                f"The model's chat template cannot render the messages ({reason}).", param="messages"
            ) from error

    def _deadline_check(self) -> Callable[[], str]:
        deadline = self._clock() + self._timeout_s

        def check() -> str:
            if self._clock() > deadline:
                raise TemplateTimeout
            return ""

        return check


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _add_deadline_checks(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Put a look at the clock at the start of every loop turn and macro call."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        line = block.lineno
        call = nodes.Call(nodes.Name(_CHECK, "load", lineno=line), [], [], None, None, lineno=line)
        check = nodes.ExprStmt(call, lineno=line)
        check.set_environment(environment)
        block.body.insert(0, check)


def _to_json(
    value: Any,  # noqa: ANN401 - any value of a template
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Hugging Face's filter: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedByTemplate(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
