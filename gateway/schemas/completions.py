"""`/v1/completions`: request, answer and chunks."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.schemas.sampling import SamplingFields
from gateway.schemas.usage import Usage


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of a text completion. `prompt`: a text, a list with one text, token ids, or a list with one list of ids."""

    prompt: str | list[str | int | list[int]]


class TextChoice(msgspec.Struct, frozen=True):
    """One answer, or its part of a chunk."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class TextCompletion(msgspec.Struct, frozen=True):
    """The whole answer, and every chunk of a stream: both are `text_completion` in the OpenAI description."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
