"""`/v1/chat/completions`: request, answer and chunks."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.schemas.sampling import SamplingFields
from gateway.schemas.usage import Usage


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only text is served, whatever else a part holds is not even read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A call made in an earlier turn. `arguments` is whatever the model wrote, also broken JSON."""

    name: str
    arguments: Any = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call made in an earlier turn."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of a chat completion."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer of a request that does not stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    system_fingerprint: str


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream. `usage` is null in all but the last chunk if the client asked for it, else absent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
