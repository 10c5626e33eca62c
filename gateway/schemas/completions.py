"""`/v1/completions`: request, answer and chunks."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.schemas.sampling import MAX_CHOICES, SamplingFields
from gateway.schemas.usage import Timing, Usage

MAX_LOGPROBS = 5


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of a text completion. `prompt`: a text, token ids, or a list of texts or of lists of ids.

    `logprobs` counts alternatives, 0 asks for the generated tokens' own alone.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Four lists of equal length, one entry per token. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[Mapping[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    """One answer, or its part of a chunk."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True):
    """The whole answer, and every chunk of a stream: both are `text_completion` in the OpenAI description."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    timing: Timing | UnsetType = UNSET
