"""The request fields that several endpoints share. None means: the client did not say."""

from typing import Annotated

import msgspec
from msgspec import Meta, field

from gateway.schemas.grammar import NonEmpty, Options, ResponseFormat, StructuredOutputs, null

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 512
MAX_STOP_IDS = 128
MAX_SALT_CHARS = 256

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


MAX_BIASED_TOKENS = 1024
MAX_TOP_LOGPROBS = 20

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries besides the text. `continuous_usage_stats` puts the counts so far into every chunk,
    `include_timing` the answer's times into the last one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timing: bool | None = None
    include_obfuscation: bool | None = None


class DrawingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of an answer are drawn, and where it ends: in every request that generates, with the ranges of the
    OpenAI description (and vLLM's names beyond it)."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """-1, 0 and anything from the vocabulary's size up: off."""
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    """Higher is sooner."""
    stream: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None


class SamplingFields(DrawingFields, frozen=True, kw_only=True):
    """Fields of both kinds of completion."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: msgspec.Raw = field(default_factory=null)
    guided_regex: NonEmpty | None = None
    guided_choice: Options | None = None
    guided_grammar: NonEmpty | None = None
    structured_outputs: StructuredOutputs | None = None
