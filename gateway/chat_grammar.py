"""What the answer of a chat must match: what its client asked for, or calls, and behind the model's thoughts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidRequest
from gateway.chat_answer import call_framing, thoughts_ahead
from gateway.guidance.fields import RequestedGrammar
from gateway.guidance.source import ContextFree
from gateway.reasoning import thoughts_rules
from gateway.served_models import ServedModel, ServedModels
from gateway.tools.grammar import calls_grammar
from gateway.tools.request import ToolUse


@dataclass(frozen=True, slots=True)
class ChatGrammar:
    """Lets a model that thinks do so before it answers as it must. `wanted` as tools: the answer must be calls."""

    wanted: RequestedGrammar | ToolUse

    async def compile(self, model: ServedModel, models: ServedModels, prompt_ids: Sequence[int]) -> str:
        """Return the grammar in llguidance's JSON form; raises `InvalidGrammar` naming the field, or `Unavailable`."""
        wanted, terminal = self.wanted, model.tokenizer.lark_terminal
        if isinstance(wanted, ToolUse):
            wanted = RequestedGrammar(ContextFree(calls_grammar(wanted, call_framing(model), terminal)), "tools")
        ahead = thoughts_ahead(model, prompt_ids)
        if ahead is not None:
            wanted = replace(wanted, thoughts=thoughts_rules(ahead.markers, is_open=ahead.is_open, terminal=terminal))
        return await wanted.compile(model, models, prompt_ids)


def chat_grammar(requested: RequestedGrammar | None, tools: ToolUse | None) -> ChatGrammar | None:
    """Return what the answer must match, None if any text will do."""
    if requested is not None and tools is not None:
        raise InvalidRequest(
            f"`{requested.param}` leaves no room for calls: it cannot be combined with `tools` unless `tool_choice` is "
            '"none".',
            param=requested.param,
        )
    if tools is not None and tools.is_forced:
        return ChatGrammar(tools)
    return None if requested is None else ChatGrammar(requested)
