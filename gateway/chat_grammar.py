"""What the answer of a chat must match: what its client asked for, or calls, and behind the model's thoughts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidRequest
from gateway.chat_answer import call_framing, thoughts_ahead
from gateway.guidance.fields import RequestedGrammar
from gateway.guidance.source import ContextFree
from gateway.reasoning import thoughts_rules
from gateway.served_models import ServedModel, ServedModels
from gateway.tools.framing import Framing, FunctionXml
from gateway.tools.grammar import calls_rules, free_rules
from gateway.tools.request import ToolUse


@dataclass(frozen=True, slots=True)
class ChatGrammar:
    """At least one of both is there. A model that thinks may do so first."""

    requested: RequestedGrammar | None
    tools: ToolUse | None

    async def compile(self, model: ServedModel, models: ServedModels, prompt_ids: Sequence[int]) -> str:
        """Return the grammar in llguidance's JSON form; raises `InvalidGrammar` naming the field, or `Unavailable`."""
        body, rules = self._body(model)
        ahead = thoughts_ahead(model, prompt_ids)
        if ahead is not None:
            body = f"thoughts ({body})"
            rules += thoughts_rules(ahead.markers, is_open=ahead.is_open, terminal=model.tokenizer.lark_terminal)
        lark = "\n".join([f"start: {body}", *rules, ""])
        if self.requested is None:
            wanted = RequestedGrammar(ContextFree(lark), "tools")
        else:
            wanted = replace(self.requested, rules=lark) if rules else self.requested
        return await wanted.compile(model, models, prompt_ids)

    def _body(self, model: ServedModel) -> tuple[str, list[str]]:
        """Return what the answer is, and the rules that say it."""
        if self.tools is None:
            return "@answer", []
        framing, terminal = call_framing(model, self.tools), model.tokenizer.lark_terminal
        if isinstance(framing, FunctionXml):
            raise _no_grammar(self.requested)
        rules = calls_rules(self.tools, framing, terminal)
        if self.requested is not None:
            _check_apart(framing, self.requested.param)
            return "calls | @answer", rules
        if self.tools.is_forced:
            return "calls", rules
        return "free", [*rules, *free_rules(framing, terminal)]


def chat_grammar(requested: RequestedGrammar | None, tools: ToolUse | None) -> ChatGrammar | None:
    """Return what the answer must match, None if any text will do."""
    if requested is not None and tools is not None and tools.is_forced:
        raise InvalidRequest(
            f"`{requested.param}` cannot be combined with a `tool_choice` that demands calls.", param=requested.param
        )
    if requested is None and (tools is None or not (tools.is_forced or tools.is_strict)):
        return None
    return ChatGrammar(requested, tools)


def _no_grammar(requested: RequestedGrammar | None) -> InvalidRequest:
    """Return the refusal of what only a grammar of calls could promise."""
    if requested is None:
        what, param = "`strict` functions need a `tool_choice` that demands calls", "tools"
    else:
        what, param = f"`{requested.param}` cannot be combined with `tools`", requested.param
    message = f"{what} for this model, which writes calls as XML."
    return InvalidRequest(message, param=param, code="unsupported_parameter")


def _check_apart(framing: Framing, param: str) -> None:
    """No grammar, and no reader, can tell a call that is a bare object from an answer that is one."""
    if framing.is_bare:
        raise InvalidRequest(
            f"`{param}` cannot be combined with `tools` for this model, which writes calls as JSON objects.",
            param=param,
            code="unsupported_parameter",
        )
