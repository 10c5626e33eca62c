"""What a request tells the model's chat template beside its messages."""

from collections.abc import Mapping

from common.errors import InvalidRequest
from gateway.schemas.chat import ChatRequest

ALLOWED = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
"""Everything else in there could replace what the server decides."""


def template_kwargs(request: ChatRequest) -> dict[str, bool | str]:
    """Return the variables of the template that the request sets; raises `InvalidRequest` for any that it may not."""
    kwargs = allowed_kwargs(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
    return kwargs


def allowed_kwargs(kwargs: Mapping[str, object]) -> dict[str, bool | str]:
    """Return those variables that say something; raises `InvalidRequest` for any that may not be set."""
    allowed: dict[str, bool | str] = {}
    for name, value in kwargs.items():
        if name not in ALLOWED:
            raise InvalidRequest(
                f"`chat_template_kwargs` may only hold {', '.join(sorted(ALLOWED))}.",
                param="chat_template_kwargs",
                code="unsupported_parameter",
            )
        if isinstance(value, bool | str):
            allowed[name] = value
        elif value is not None:
            raise InvalidRequest(
                f"`chat_template_kwargs.{name}` must be a boolean or a string.", param=f"chat_template_kwargs.{name}"
            )
    return allowed
