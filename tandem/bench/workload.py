"""The requests of a load test, a function of its seed: when each one arrives and what it asks."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.bench.settings import LOWEST_TOKEN_ID


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that arrives `arrival_s` after the start; its prompt is a list of token ids."""

    arrival_s: float
    prompt: list[int]


def plan_requests(
    *, num_requests: int, num_input_tokens: int, highest_token_id: int, rate: float | None, seed: int
) -> list[PlannedRequest]:
    """Return the requests in the order of their arrival; without a rate all of them are there from the start."""
    chance = random.Random(seed)
    prompts = _unique_prompts(chance, num_requests, num_input_tokens, highest_token_id)
    return [
        PlannedRequest(arrival, prompt)
        for arrival, prompt in zip(_arrivals(chance, num_requests, rate), prompts, strict=True)
    ]


def _arrivals(chance: random.Random, num_requests: int, rate: float | None) -> Sequence[float]:
    if rate is None:
        return [0.0] * num_requests
    now_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        arrivals.append(now_s)
        now_s += chance.expovariate(rate)
    return arrivals


def _unique_prompts(
    chance: random.Random, num_requests: int, num_input_tokens: int, highest_token_id: int
) -> Iterator[list[int]]:
    """Yield prompts that differ in their first tokens too, so that none is a cached prefix of another.

    Only prompts of a token or two can run out of differences; those may repeat.
    """
    seen: set[tuple[int, ...]] = set()
    for _ in range(num_requests):
        for _attempt in range(8):
            prompt = [chance.randint(LOWEST_TOKEN_ID, highest_token_id) for _ in range(num_input_tokens)]
            start = tuple(prompt[:4])
            if start not in seen:
                break
        seen.add(start)
        yield prompt
