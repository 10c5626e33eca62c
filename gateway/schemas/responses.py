"""`/v1/responses`: request, answer and events. A `msgspec.Raw` holds any JSON value, not looked into here."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.schemas.chat import ContentPart, TokenLogprob
from gateway.schemas.sampling import MAX_TOP_LOGPROBS, DrawingFields
from gateway.schemas.tools import MAX_TOOLS, FunctionName, ReasoningEffort
from gateway.schemas.usage import Timing

LOGPROBS = "message.output_text.logprobs"

MAX_METADATA = 16

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputItem(msgspec.Struct, frozen=True):
    """One item of the conversation: a message (`role` and `content`), a `function_call` (`call_id`, `name` and
    `arguments`), a `function_call_output` (`call_id` and `output`) or `reasoning` (`content` or `summary`)."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments object."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """The model must call this function."""

    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What kind of text the answer is. `schema` is for `json_schema`; it is enforced whether it is `strict` or not."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the answer's text is made."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model thinks. There are no summaries: thoughts are told whole."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to choose."""

    include_obfuscation: Literal[False] | None = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)
]
ToolSelection = Literal["none", "auto", "required"] | NamedFunction


class ResponseRequest(DrawingFields, frozen=True, kw_only=True):
    """Body of a request for a response. Nothing is stored, whatever `store` says."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Thoughts come as plain text, ready to be sent back, in place of encrypted content."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """Text of the answer. `logprobs` has one entry per token, none if they were not asked for."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    """Thoughts."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """What the user is told."""

    id: str
    status: ItemStatus
    content: tuple[OutputText, ...]
    role: Literal["assistant"] = "assistant"


class CallItem(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    """A call of a function. `arguments` is JSON as the model wrote it; its output is sent back with `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """What the model thinks before it answers or calls."""

    id: str
    status: ItemStatus
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()


OutputItem = MessageItem | CallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` of the input came from a prefix cache. Nobody pays for what is written into it."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens` of the output are thoughts."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """How much was read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why there is no whole answer."""

    message: str
    code: Literal["server_error"] = "server_error"


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why the answer ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ToldReasoning(msgspec.Struct, frozen=True):
    """What was asked for."""

    effort: ReasoningEffort | None = None
    summary: None = None


class ToldText(msgspec.Struct, frozen=True):
    """What was asked for."""

    format: TextFormat


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, as far as it has come. `usage` is null before its end."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Mapping[str, str]
    parallel_tool_calls: bool
    reasoning: ToldReasoning
    temperature: float
    text: ToldText
    tool_choice: ToolSelection
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    timing: Timing | UnsetType = UNSET


class Event(msgspec.Struct, frozen=True, tag_field="type"):
    """One event of a stream; they are numbered from 0 on."""

    sequence_number: int


class ResponseCreated(Event, frozen=True, tag="response.created"):
    """The first event."""

    response: Response


class ResponseInProgress(Event, frozen=True, tag="response.in_progress"):
    """The second event."""

    response: Response


class ResponseCompleted(Event, frozen=True, tag="response.completed"):
    """The last event of a whole answer."""

    response: Response


class ResponseIncomplete(Event, frozen=True, tag="response.incomplete"):
    """The last event of an answer that has reached its limit."""

    response: Response


class ResponseFailed(Event, frozen=True, tag="response.failed"):
    """The last event of an answer that broke off."""

    response: Response


class ErrorEvent(Event, frozen=True, tag="error"):
    """The only event of an answer that never began."""

    message: str
    code: str | None = None
    param: str | None = None


class ItemAdded(Event, frozen=True, tag="response.output_item.added"):
    """An item begins, empty."""

    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: OutputItem


class PartEvent(Event, frozen=True):
    """About one part of an item's content."""

    item_id: str
    output_index: int
    content_index: int


class PartAdded(PartEvent, frozen=True, tag="response.content_part.added"):
    """A part begins, empty."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, tag="response.content_part.done"):
    """A part is whole."""

    part: OutputText | ReasoningText


class TextDelta(PartEvent, frozen=True, tag="response.output_text.delta"):
    """More of a text."""

    delta: str
    logprobs: tuple[TokenLogprob, ...] = ()


class TextDone(PartEvent, frozen=True, tag="response.output_text.done"):
    """A text is whole."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(PartEvent, frozen=True, tag="response.reasoning_text.delta"):
    """More thoughts."""

    delta: str


class ReasoningDone(PartEvent, frozen=True, tag="response.reasoning_text.done"):
    """The thoughts are over."""

    text: str


class ArgumentsDelta(Event, frozen=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, frozen=True, tag="response.function_call_arguments.done"):
    """A call is whole."""

    item_id: str
    output_index: int
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ErrorEvent
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
