"""A gateway whose model, in the manner of a family, says what a test tells it to; seen by the official client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from common.grammar.tokenizer import grammar_tokenizer
from common.messages.registry import ModelCard
from gateway.engine import FinishReason
from tests.support.family_templates import HERMES, LLAMA, MISTRAL
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.scripted_engine import ScriptedEngine, Step, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, id_of, tiny_card

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": SCHEMA}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "東京", "days": 2}'


@dataclass(frozen=True)
class Family:
    """A model in the manner of a family, and how it writes a call. `special`: its markers are no ordinary text."""

    template: str
    special: bool
    call: str


FAMILIES = {
    "hermes": Family(HERMES, False, f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'),
    "hermes-special": Family(
        HERMES, True, f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    ),
    "llama": Family(LLAMA, True, f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
    "mistral": Family(MISTRAL, True, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
}


def tokenizer(*, special: bool) -> Tokenizer:
    made = byte_level_tokenizer()
    tokens = [AddedToken(text, special=special) for text in MARKERS]
    if special:
        made.add_special_tokens(tokens)
    else:
        made.add_tokens(tokens)
    return made


def ids_of(source: Tokenizer, text: str) -> list[Step]:
    """Return a token per marker and one per other byte."""
    for marker in MARKERS:
        before, found, behind = text.partition(marker)
        if found:
            return [*ids_of(source, before), id_of(source, marker), *ids_of(source, behind)]
    return list(byte_ids(source, text))


@dataclass(frozen=True)
class Scene:
    """A gateway whose model says what it is told to."""

    gateway: Gateway
    client: openai.AsyncOpenAI
    card: ModelCard
    tokenizer: Tokenizer

    def says(self, text: str, reason: FinishReason = FinishReason.STOP) -> list[int]:
        script = ids_of(self.tokenizer, text)
        self.gateway.engine.play([*script, Stop(reason)])
        return [step for step in script if isinstance(step, int)]

    async def whole(self, **fields: Any) -> Any:
        answer = await self.client.chat.completions.create(**(self.chat() | fields))
        return answer.choices[0]

    async def streamed(self, **fields: Any) -> "Streamed":
        stream = await self.client.chat.completions.create(**(self.chat() | fields), stream=True)
        return Streamed([chunk.choices[0] async for chunk in stream])

    def chat(self) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "Rain?"}]}

    async def refused(self, **fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as caught:
            await self.client.chat.completions.create(**(self.chat() | fields))
        return caught.value

    def grammar_takes(self, ids: list[int]) -> bool:
        """Whether the grammar that the workers were told lets the model write this, and then end."""
        grammar = self.gateway.engine.requests[-1].sampling.grammar
        assert grammar is not None
        matcher = LLMatcher(grammar_tokenizer(self.card.tokenizer, self.card.vocab_size, self.card.eos_ids), grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def prompt(self) -> str:
        ids = list(self.gateway.engine.requests[-1].prompt_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class Streamed:
    """What the chunks of a stream add up to."""

    def __init__(self, choices: list[Any]) -> None:
        self.deltas = [choice.delta for choice in choices]
        self.finish_reason = choices[-1].finish_reason
        self.content = "".join(delta.content or "" for delta in self.deltas)
        self.thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in self.deltas)
        self.calls: list[list[str]] = []
        for delta in self.deltas:
            for call in delta.tool_calls or []:
                self._add(call)

    def _add(self, call: Any) -> None:
        if call.id is not None:
            assert call.type == "function"
            assert call.index == len(self.calls)
            self.calls.append([call.function.name, ""])
        self.calls[call.index][1] += call.function.arguments


@asynccontextmanager
async def scene(template: str, *, special: bool = False, **settings: Any) -> AsyncIterator[Scene]:
    source = tokenizer(special=special)
    card = tiny_card(source, chat_template=template, max_context=4096)
    async with (
        running_gateway(ScriptedEngine([card]), **settings) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        yield Scene(gateway, client, card, source)
