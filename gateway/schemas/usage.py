"""Token counts of an answer."""

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` of the prompt came from a prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`prompt_tokens_details` is absent when a stop string ended the answer before the engine told."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
