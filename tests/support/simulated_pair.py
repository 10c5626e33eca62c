"""A decode and a prefill worker in virtual time: their schedulers, meters and the placing are real, steps take what a
machine is told to take. For questions about the policy, not about protocols: hand-overs always succeed.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.messages.registry import StepCost
from common.scheduling.emission import Emission
from common.scheduling.pace import PaceMeter, TwinMeter
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import Sequence, SequenceKey
from decode_worker.core import Activate, Admit, DecodeCore, LetGo, Reserved
from decode_worker.first_token import FirstToken
from decode_worker.placing import Bounds, Placing, There, prompt_allowance
from decode_worker.scheduler import DecodeScheduler
from prefill_worker.scheduler import PrefillScheduler
from tests.support.sequences import sequence

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000
HANDOVER_S = 0.004
BOUNDS = Bounds(chunk_size=256, token_budget=512, itl_target_s=0.1)
TTFT_SLO_S, ITL_SLO_S = 1.0, 0.15
TOKEN = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """`decode` and `prefill` are what steps of these workers cost; where `is_shared` each takes twice as long while the
    other one computes as well."""

    decode: StepCost
    prefill: StepCost
    is_shared: bool = False


@dataclass(slots=True)
class Answer:
    """When a request came and when its tokens did."""

    arrived_s: float
    times_s: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the first token and 99 % of the others came in time."""
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(self.times_s))
        worst_s = gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0
        return self.times_s[0] - self.arrived_s <= TTFT_SLO_S and worst_s <= ITL_SLO_S


class SimulatedPair:
    """`mode` is a value of `--disaggregation`; without a prefill worker give `never`."""

    def __init__(self, machine: Machine, mode: str) -> None:
        self._machine = machine
        self._mode = mode
        self._pace, self._prefill_pace = TwinMeter(), PaceMeter()
        self._core = self._make_core()
        pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        self._prefill = PrefillScheduler(
            pool,
            PrefixCache(pool, BLOCK_SIZE, "f"),
            block_size=BLOCK_SIZE,
            token_budget=BOUNDS.token_budget,
            chunk_size=BOUNDS.chunk_size,
        )
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._is_busy = {"decode": False, "prefill": False}
        self._sequences: dict[SequenceKey, Sequence] = {}
        self.answers: dict[SequenceKey, Answer] = {}

    def run(self, requests: Iterable[tuple[float, list[int], int]]) -> list[Answer]:
        """Return the answers to requests: when each arrives, its prompt, and how many tokens it wants."""
        for number, (at_s, prompt, num_tokens) in enumerate(requests):
            one = sequence(str(number), prompt, arrival=number, max_tokens=num_tokens)
            self._at(at_s, partial(self._arrive, one))
        while self._events:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
            self._start_decode()
            self._start_prefill()
        return list(self.answers.values())

    def _make_core(self) -> DecodeCore:
        pool = BlockPool(NUM_BLOCKS, [0] * NUM_BLOCKS)
        prefix = PrefixCache(pool, BLOCK_SIZE, "f")
        scheduler = DecodeScheduler(
            pool,
            prefix,
            block_size=BLOCK_SIZE,
            max_sequences=64,
            token_budget=BOUNDS.token_budget,
            chunk_size=BOUNDS.chunk_size,
            max_context=8192,
            prompt_allowance=lambda decoding, pairs, context: prompt_allowance(
                self._pace.cost, decoding, pairs, context, BOUNDS
            ),
        )
        local_max = 0 if self._mode == "always" else 16
        placing = Placing(BOUNDS, local_max, is_measured=self._mode == "auto")
        return DecodeCore(scheduler, pool, prefix, BLOCK_SIZE, placing, None, self._pace)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act))

    def _arrive(self, one: Sequence) -> None:
        self._sequences[one.key] = one
        self.answers[one.key] = Answer(self._now_s)
        cost = self._prefill_pace.cost
        there = None if cost is None or self._mode != "auto" else There(cost, handover_s=HANDOVER_S)
        self._core.obey(Admit(one, self._mode != "never", there=there))

    def _start_decode(self) -> None:
        if self._is_busy["decode"]:
            return
        plan, events = self._core.plan()
        for event in events:
            if isinstance(event, Reserved):
                own = self._sequences[event.key]
                copy = Sequence(own.key, list(own.token_ids), own.num_prompt, own.sampling, own.arrival)
                self._at(self._now_s + HANDOVER_S / 2, partial(self._prefill.add, copy))
        if plan:
            run_s = self._duration_s("decode", self._machine.decode, plan)
            self._at(self._now_s + run_s, partial(self._end_decode, plan, run_s))

    def _start_prefill(self) -> None:
        if self._is_busy["prefill"]:
            return
        plan = self._prefill.plan()
        if plan:
            run_s = self._duration_s("prefill", self._machine.prefill, plan)
            self._at(self._now_s + run_s, partial(self._end_prefill, plan, run_s))

    def _duration_s(self, name: str, cost: StepCost, plan: StepPlan) -> float:
        others_run = any(is_busy for other, is_busy in self._is_busy.items() if other != name)
        self._is_busy[name] = True
        factor = 2 if self._machine.is_shared and others_run else 1
        return factor * cost.step_s(plan.num_tokens, plan.num_pairs)

    def _end_decode(self, plan: StepPlan, run_s: float) -> None:
        self._is_busy["decode"] = False
        tokens = {chunk.sequence.key: TOKEN for chunk in plan.chunks if chunk.samples}
        for event in self._core.settle(plan, StepResult(tokens, run_s=run_s)):
            assert isinstance(event, Emission)
            self.answers[event.key].times_s.append(self._now_s)

    def _end_prefill(self, plan: StepPlan, run_s: float) -> None:
        self._is_busy["prefill"] = False
        self._prefill_pace.note(plan, run_s)
        tokens = {chunk.sequence.key: TOKEN for chunk in plan.chunks if chunk.samples}
        for progress in self._prefill.settle(plan, StepResult(tokens)):
            if progress.token is not None:
                self._at(self._now_s + HANDOVER_S / 2, partial(self._hand_over, progress.key))

    def _hand_over(self, key: SequenceKey) -> None:
        self._prefill.release(key)
        for event in self._core.obey(Activate(key, FirstToken(TOKEN, 0))):
            assert isinstance(event, Emission)
            self.answers[key].times_s.append(self._now_s)
        self._core.obey(LetGo(key))


def mixed(rate: float, duration_s: float, seed: int) -> list[tuple[float, list[int], int]]:
    """Return Poisson arrivals: chats of 60 to 300 tokens, every fifth a prompt of 1024 to 4096."""
    chance = random.Random(seed)
    requests, now_s = list[tuple[float, list[int], int]](), chance.expovariate(rate)
    while now_s < duration_s:
        bounds = (60, 300) if chance.random() < 0.8 else (1024, 4096)
        prompt = [len(requests), *(chance.randint(0, 10_000) for _ in range(chance.randint(*bounds)))]
        requests.append((now_s, prompt, chance.randint(32, 96)))
        now_s += chance.expovariate(rate)
    return requests


def goodput(answers: Iterable[Answer], duration_s: float) -> float:
    """Return the good answers per second."""
    return sum(answer.is_good for answer in answers) / duration_s
