"""Token counts of an answer."""

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` of the prompt came from a prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """How much was read and written for one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
