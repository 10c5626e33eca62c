"""What the machine allows: its measured read bandwidth and rate of bf16 products, and how much of both a step needs.

A step reads the weights once and the pages of all sequences once, and it multiplies every token with every weight. It
cannot be quicker than the slower of the two, even if both go on at the same time.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from common.model.config import ModelConfig

READ_BYTES = 1 << 28
"""Far more than any cache holds, and about what the bundled model's weights are."""

TRIES = 7
GEMM_SHAPES = ((512, 2048, 2048), (1024, 1024, 4096), (2048, 2048, 2048))


@dataclass(frozen=True, slots=True)
class Limits:
    """Of so many threads: bytes per second that they read, and bf16 operations per second."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step cannot do without."""

    num_bytes: float
    flops: float

    def floor_s(self, limits: Limits) -> float:
        """Return the shortest time that the machine allows."""
        return max(self.num_bytes / limits.read_bytes_per_s, self.flops / limits.flops_per_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


def measure_limits() -> Limits:
    """Return the best that torch does with the threads that it has been given."""
    return Limits(_read_bytes_per_s(), max(_flops_per_s(*shape) for shape in GEMM_SHAPES))


def step_cost(config: ModelConfig, token_bytes: int, num_tokens: int, num_pairs: int, contexts: int, rows: int) -> Cost:
    """Return the cost of a step over `num_tokens` tokens, `rows` of which are sampled.

    `num_pairs` are pairs of a token and one that it attends to, `contexts` the tokens whose pages are read, each of
    `token_bytes`.
    """
    weights, head = layer_weights(config), config.vocab_size * config.hidden_size
    width = config.num_heads * config.head_dim
    flops = 2 * weights * num_tokens + 2 * head * rows + 4 * config.num_layers * width * num_pairs
    return Cost(2 * (weights + head * bool(rows)) + token_bytes * contexts, flops)


def layer_weights(config: ModelConfig) -> int:
    """Return how many weights the linear layers have, the head not among them."""
    queries, pages = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * pages)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _read_bytes_per_s() -> float:
    numbers = torch.ones(READ_BYTES // 4)
    ways: tuple[Callable[[], object], ...] = (numbers.max, lambda: torch.dot(numbers, numbers))
    return READ_BYTES / min(_median_s(way) for way in ways)


def _flops_per_s(rows: int, inner: int, columns: int) -> float:
    left, right = torch.ones(rows, inner, dtype=torch.bfloat16), torch.ones(columns, inner, dtype=torch.bfloat16)
    return 2 * rows * inner * columns / _median_s(lambda: functional.linear(left, right))


def _median_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[1:])
