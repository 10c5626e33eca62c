"""`python -m bench.engine.steps`: the steps of one number of threads, in a process of its own, as lines of JSON.

The model is loaded and run as a worker does it, by plans of a scheduler's kind; only the scheduler and the rest of the
process are missing.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

from bench.engine.floor import Cost, Limits, measure_limits, step_cost
from common.messages.ids import BlockId, Epoch, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.runtime.foundation import Foundation, lay_foundation
from common.runtime.model_loading import load_model
from common.runtime.runner import CausalModel, ModelRunner, allocate_pages
from common.scheduling.plan import Chunk, StepPlan
from common.scheduling.sequence import Sequence, SequenceKey
from common.settings.engine import KERNELS, EngineSettings

BATCHES = (1, 8, 32, 64)
CONTEXTS = (128, 1024, 4096)
PROMPTS = (128, 1024, 4096)
SMALLEST_VOCABULARY = 256
"""Which tokens they are costs nothing; every model has these."""

MOST_TOKENS = 32 * 4096
"""In all pages together: 3 GB of the bundled model. What needs more is left out."""

WARM_UPS = 2
STEPS = 9
LONGEST_S = 2.0
"""Of warming up and measuring one shape; one turn of each is made at least, however long it takes."""


class Measured(msgspec.Struct, frozen=True):
    """One shape: `kind` is "decode" (a step of `batch` sequences) or "prefill" (a prompt, in chunks)."""

    kind: str
    threads: int
    batch: int
    context: int
    seconds: float
    floor_s: float


class Machine(msgspec.Struct, frozen=True):
    """What the threads could do, see `Limits`."""

    threads: int
    read_bytes_per_s: float
    flops_per_s: float
    model: str = ""
    """Name of the class that computes."""


@dataclass(frozen=True, slots=True)
class Rig:
    """A loaded model with pages that hold numbers."""

    foundation: Foundation
    model: CausalModel
    runner: ModelRunner
    chunk_size: int

    def cost(self, plan: StepPlan, num_sampled: int) -> Cost:
        """Return what the plan needs at least."""
        contexts = sum(chunk.start + chunk.length for chunk in plan.chunks)
        config, token_bytes = self.foundation.checkpoint.config, self.foundation.layout.token_bytes
        return step_cost(config, token_bytes, plan.num_tokens, plan.num_pairs, contexts, num_sampled)


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--kernels", choices=KERNELS, default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    limits = measure_limits()
    settings = EngineSettings(model=arguments.model, threads=arguments.threads, kernels=arguments.kernels)
    rig = set_up(settings)
    _say(Machine(arguments.threads, limits.read_bytes_per_s, limits.flops_per_s, type(rig.model).__name__))
    if arguments.only != "prefill":
        for measured in decode_steps(rig, limits, arguments.threads):
            _say(measured)
    if arguments.only != "decode":
        for measured in prefill_steps(rig, limits, arguments.threads):
            _say(measured)
    return 0


def set_up(settings: EngineSettings) -> Rig:
    """Load the model, and give it pages that were written before, as a worker's are after a while."""
    foundation = lay_foundation(settings, Epoch(1))
    model = load_model(foundation, settings, lambda _: None)
    layout = foundation.layout
    pages = allocate_pages(layout, layout.num_blocks_for(MOST_TOKENS))
    pages[0].normal_()
    pages[1:] = pages[0]
    return Rig(foundation, model, ModelRunner(model, pages, layout.block_size), settings.chunk_size)


def decode_plan(batch: int, context: int, block_size: int, chance: random.Random) -> StepPlan:
    """Return a step of the last token of `batch` sequences of `context` tokens, each in blocks of its own."""
    return StepPlan(
        tuple(
            Chunk(sequence, context - 1, 1, samples=True)
            for sequence in (_sequence(index, context, block_size, chance) for index in range(batch))
        )
    )


def prefill_plans(num_tokens: int, chunk_size: int, block_size: int, chance: random.Random) -> list[StepPlan]:
    """Return the steps of a prompt; the last one samples."""
    sequence = _sequence(0, num_tokens, block_size, chance)
    starts = range(0, num_tokens, chunk_size)
    lengths = [min(chunk_size, num_tokens - start) for start in starts]
    return [
        StepPlan((Chunk(sequence, start, length, samples=start + length == num_tokens),))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _sequence(index: int, num_tokens: int, block_size: int, chance: random.Random) -> Sequence:
    num_blocks = -(-num_tokens // block_size)
    return Sequence(
        key=SequenceKey(RequestId(f"bench-{index}"), PlacementNumber(0)),
        token_ids=[chance.randrange(SMALLEST_VOCABULARY) for _ in range(num_tokens)],
        num_prompt=num_tokens,
        sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
        arrival=index,
        block_ids=[BlockId(index * num_blocks + place) for place in range(num_blocks)],
    )


def decode_steps(rig: Rig, limits: Limits, threads: int) -> Iterator[Measured]:
    """Measure a step by context and batch, as far as the pages hold that."""
    chance, block_size = random.Random(0), rig.foundation.layout.block_size
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch * context <= MOST_TOKENS:
                plan = decode_plan(batch, context, block_size, chance)
                seconds = _median_s(rig.runner, [plan])
                yield Measured("decode", threads, batch, context, seconds, rig.cost(plan, batch).floor_s(limits))


def prefill_steps(rig: Rig, limits: Limits, threads: int) -> Iterator[Measured]:
    """Measure whole prompts."""
    chance, block_size = random.Random(0), rig.foundation.layout.block_size
    for num_tokens in PROMPTS:
        plans = prefill_plans(num_tokens, rig.chunk_size, block_size, chance)
        floor_s = sum(rig.cost(plan, int(plan is plans[-1])).floor_s(limits) for plan in plans)
        yield Measured("prefill", threads, 1, num_tokens, _median_s(rig.runner, plans), floor_s)


def _median_s(runner: ModelRunner, plans: list[StepPlan]) -> float:
    """Return how long the plans take one after another."""
    _turns(runner, plans, WARM_UPS, LONGEST_S / 4)
    return statistics.median(_turns(runner, plans, STEPS, LONGEST_S))


def _turns(runner: ModelRunner, plans: list[StepPlan], most: int, longest_s: float) -> list[float]:
    """Return the time of each turn; no more begin when `longest_s` are over."""
    times: list[float] = []
    while len(times) < most and sum(times) < longest_s:
        began_s = time.perf_counter()
        for plan in plans:
            runner.run(plan)
        times.append(time.perf_counter() - began_s)
    return times


def _say(what: Measured | Machine) -> None:
    sys.stdout.write(msgspec.json.encode({"type": type(what).__name__, **msgspec.structs.asdict(what)}).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
