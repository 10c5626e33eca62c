"""The requests of each workload, a function of workload and round: every side gets the same, and nobody had one before.

Prompts are random token ids, so that none begins like another one and no cache of prefixes helps anybody.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.bench.settings import LOWEST_TOKEN_ID

HIGHEST_TOKEN_ID = 10_000

CHAT_SHARE = 0.8
CHAT_PROMPTS = (60, 300)
LONG_PROMPTS = (1024, 4096)
MIXED_ANSWERS = (32, 96)
RATES = (0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion of `num_tokens` tokens behind the token ids `prompt`, greedy, not ended by any of them.

    It is sent `at_s` after the start or, if seats are limited, as soon as one is free behind that.
    """

    prompt: Sequence[int]
    num_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and how many of them are in progress at most; None: all that have arrived.

    `burst_at_s`: when the requests that are the load arrive; those before it are streams to be disturbed.
    """

    name: str
    asks: Sequence[Ask]
    seats: int | None = None
    burst_at_s: float | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    lone: int = 6
    answer: int = 64
    prompt: int = 128
    waves: int = 2
    num_running: int = 4
    running_answer: int = 320
    burst_at_s: float = 2.0
    num_burst: int = 8
    burst_prompt: int = 1024
    burst_answer: int = 4
    mixed_s: float = 40.0


QUICK = Sizes(lone=2, answer=8, waves=1, running_answer=40, burst_at_s=0.6, num_burst=2, burst_prompt=256, mixed_s=4.0)

STREAMS = (1, 8, 32)
NAMES = ("lone", *(f"streams-{num}" for num in STREAMS), "prefill", *(f"mixed-{rate:g}" for rate in RATES))


def plan(name: str, seed: int, sizes: Sizes) -> Workload:
    """Return the workload `name` with the prompts of `seed`; raises `ValueError` for a name that is none."""
    chance = random.Random(f"{name} {seed}")
    kind, _, number = name.partition("-")
    if name == "lone":
        return Workload(name, _alike(chance, sizes.lone, sizes.prompt, 8), seats=1)
    if kind == "streams":
        num_seats = int(number)
        num_asks = max(3, num_seats * sizes.waves)
        return Workload(name, _alike(chance, num_asks, sizes.prompt, sizes.answer), seats=num_seats)
    if name == "prefill":
        running = _alike(chance, sizes.num_running, sizes.prompt, sizes.running_answer)
        burst = _alike(chance, sizes.num_burst, sizes.burst_prompt, sizes.burst_answer, sizes.burst_at_s)
        return Workload(name, [*running, *burst], burst_at_s=sizes.burst_at_s)
    if kind == "mixed":
        return _mixed(name, chance, float(number), sizes.mixed_s)
    raise ValueError(f"no workload {name}; there are {', '.join(NAMES)}")


def _mixed(name: str, chance: random.Random, rate: float, duration_s: float) -> Workload:
    """Return Poisson arrivals for `duration_s`: chats with now and then a long prompt among them."""
    asks, now_s = list[Ask](), chance.expovariate(rate)
    while now_s < duration_s:
        bounds = CHAT_PROMPTS if chance.random() < CHAT_SHARE else LONG_PROMPTS
        asks.append(Ask(_prompt(chance, chance.randint(*bounds)), chance.randint(*MIXED_ANSWERS), now_s))
        now_s += chance.expovariate(rate)
    return Workload(name, asks or _alike(chance, 1, CHAT_PROMPTS[0], MIXED_ANSWERS[0]), duration_s=duration_s)


def _alike(chance: random.Random, num: int, num_prompt: int, num_tokens: int, at_s: float = 0.0) -> list[Ask]:
    return [Ask(_prompt(chance, num_prompt), num_tokens, at_s) for _ in range(num)]


def _prompt(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randint(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID) for _ in range(num_tokens)]
