"""A model's chat template: compiled once, rendered in a sandbox, stopped at a deadline.

A template comes with the model's files, so it is not trusted: it runs in jinja2's immutable sandbox
(`gateway.template_sandbox`), and every turn of its loops, macros and blocks looks at the clock (a thread cannot be
killed from outside).
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError

from common.errors import GenerationFailed, InvalidRequest
from gateway.messages import TemplateMessage
from gateway.template_sandbox import RefusedByTemplate, TemplateTimeout, add_checks, new_sandbox
from gateway.tools.framing import framing_of
from gateway.tools.request import ToolUse

_CHECK = "tandem_check_deadline"

QUICK_S = 0.001
"""What one turn of the event loop may take beside all the others."""

NUM_QUICK = 8
"""So many conversations in a row must have been rendered quickly before a template is trusted to be quick."""


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
        environment = new_sandbox()
        tree = environment.parse(source)
        self._variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        self._writes_calls = "tools" in self._variables and framing_of(source) is not None
        add_checks(tree, environment, _CHECK)
        self._template = environment.from_string(tree)
        self._template.globals = dict(self._template.globals)  # jinja2's chain of maps would be copied item by item
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._timeout_s = timeout_s
        self._clock = clock
        self._num_quick = 0

    @property
    def is_quick(self) -> bool:
        """Whether it has always been, of late: then a short conversation may be rendered on the event loop, for a
        thread's turn costs more."""
        return self._num_quick >= NUM_QUICK

    def render(
        self, messages: Iterable[TemplateMessage], kwargs: Mapping[str, Any], tools: ToolUse | None = None
    ) -> str:
        """Return the prompt that asks for the assistant's next turn.

        Raises `InvalidRequest` if the template refuses the messages or cannot take the rest into account,
        `GenerationFailed` if the template is at fault.
        """
        self._check_kwargs(kwargs)
        self._check_tools(tools)
        variables = {
            **kwargs,
            **self._tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools.described),
            "documents": None,
            "add_generation_prompt": True,
            _CHECK: self._deadline_check(),
        }
        # Reading the time of one thread is a system call. A trusted template is watched by the wall clock, which may
        # blame it for what others do: then it has to show again that it is quick.
        clock = time.perf_counter if self.is_quick else time.thread_time
        began_s = clock()
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
        finally:
            is_quick = clock() - began_s < QUICK_S
            self._num_quick = self._num_quick + 1 if is_quick else 0

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """What asks for nothing that the model does not do anyway is taken: not to think."""
        for name, value in kwargs.items():
            if name not in self._variables and value is not False:
                raise InvalidRequest(
                    f"`{name}` is not known to the model's chat template.", param=name, code="unsupported_parameter"
                )

    def _check_tools(self, tools: ToolUse | None) -> None:
        """A call that is forced is written by a grammar, whether the model was taught to call or not."""
        if tools is not None and not tools.is_forced and not self._writes_calls:
            raise InvalidRequest(
                "The model's chat template does not say how it calls tools; `tool_choice` may be a function's name, "
                '"required" or "none".',
                param="tools",
                code="unsupported_parameter",
            )

    def _deadline_check(self) -> Callable[[], str]:
        deadline = self._clock() + self._timeout_s

        def check() -> str:
            if self._clock() > deadline:
                raise TemplateTimeout
            return ""

        return check
