"""`/v1/chat/completions`: request, answer and chunks."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.schemas.sampling import MAX_TOP_LOGPROBS, SamplingFields
from gateway.schemas.tools import ReasoningEffort, ToolChoice, Tools
from gateway.schemas.usage import Timing, Usage


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
    """A call made in an earlier turn. Calls of other things than functions are refused."""

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
    reasoning: str | None = None
    """What some clients call `reasoning_content`."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of a chat completion."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at its place. `bytes` are the token's own, also of half a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What the model wants to call. `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, frozen=True):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn. `content` is null if there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[AnswerToolCall, ...] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The whole answer of a request that does not stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    """More of a call: the name comes first, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(msgspec.Struct, frozen=True):
    """More of the call number `index`; its first chunk has the id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallChunk, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One answer's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream. `usage` is null in all but the last chunk if the client asked for it, else absent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
