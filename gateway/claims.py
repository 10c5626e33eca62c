"""What a request wants to be admitted for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.broker.limits import Demand, Quota
from common.messages.ids import RequestId
from gateway.callers import Caller

BYTES_PER_TOKEN = 4
"""Of a request's body: English text has 4 to 5, source code 3, Chinese 3 and less. Only an estimate: the real prompt
takes its place as soon as it is tokenised."""

DEFAULT_ANSWER_TOKENS = 256
"""What an answer is charged in advance whose client names no `max_tokens`; what it becomes is charged at its end."""


class Meter(Protocol):
    """What a request has used so far."""

    num_prompt_tokens: int
    num_tokens: int


class NoTokens:
    """The meter of a request that uses none: it counts as a request and nothing else."""

    num_prompt_tokens = 0
    num_tokens = 0


def ignore_quota(quota: Quota) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`num_prompt_tokens` is an estimate; `max_tokens` is the longest answer of each choice, None: not said.

    `meter` says in the end what was used. `on_quota` hears what the tenant has left, also when the claim is refused.
    """

    caller: Caller
    request: RequestId
    num_choices: int
    num_prompt_tokens: int
    max_tokens: int | None
    meter: Meter
    on_quota: Callable[[Quota], None] = ignore_quota

    def demand(self, num_prompt_tokens: int) -> Demand:
        """Return what to charge for a prompt of that length."""
        num_answer_tokens = DEFAULT_ANSWER_TOKENS if self.max_tokens is None else self.max_tokens
        return Demand(self.num_choices, num_prompt_tokens + self.num_choices * num_answer_tokens)


def estimated_tokens(num_body_bytes: int) -> int:
    """Return about how many tokens the prompt in a body of that size has."""
    return max(1, num_body_bytes // BYTES_PER_TOKEN)
