"""Token counts of an answer."""

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` of the prompt came from a prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens` of the answer are thoughts."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """How much was read and written for one answer; of an answer without thoughts there are no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an answer's time went, in seconds; a stage that nobody measured is absent.

    `queue_s` until a worker accepted the request, `wait_s` until its prefill began, `prefill_s` until the first token,
    `transfer_s` moving pages (overlaps the prefill), `decode_s` from the first token on. With several choices these are
    of the one that ended last. `ttft_s` and `total_s` count from the request's arrival.
    """

    admission_s: float
    tokenize_s: float
    total_s: float
    ttft_s: float | None = None
    queue_s: float | None = None
    wait_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    decode_s: float | None = None
