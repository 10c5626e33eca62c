"""What a prefill elsewhere brings beside the pages."""

from dataclasses import dataclass

from common.messages.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token behind the prompt, and how many of the prompt's tokens the prefill worker had in its prefix cache.

    `logprobs` of the token and `prompt_logprobs` of the prompt's tokens from the second on are there if asked for.
    """

    token: int
    num_cached: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
