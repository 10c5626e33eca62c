"""A decode scheduler that runs without a model, one step at a time."""

from collections.abc import Callable

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.scheduling.emission import Emission
from common.scheduling.plan import StepPlan
from common.scheduling.sequence import FinishReason, Sequence
from decode_worker.scheduler import DecodeScheduler
from decode_worker.ticket import Intake
from tests.support.paged_content import PagedContent
from tests.support.scripted_runner import ScriptedRunner, solo_output
from tests.support.sequences import key, sequence


def solo(prompt: list[int], max_tokens: int, choice: int = 0) -> list[int]:
    """Return what the prompt generates alone, without stop ids or limits of the worker."""
    return solo_output(prompt, (), max_tokens, 10**6, choice)[0]


class ScriptedDecode:
    """A decode scheduler with a pool and a runner without a model. `told` holds every emission in order."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 16,
        *,
        max_sequences: int = 8,
        token_budget: int = 64,
        chunk_size: int = 32,
        max_context: int = 512,
        max_preemptions: int = 8,
        prompt_allowance: Callable[[int, int, int], int] | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, [0] * num_blocks)
        self.content = PagedContent(self.pool, block_size)
        self.runner = ScriptedRunner(self.content)
        self.scheduler = DecodeScheduler(
            self.pool,
            PrefixCache(self.pool, block_size, "f"),
            block_size=block_size,
            max_sequences=max_sequences,
            token_budget=token_budget,
            chunk_size=chunk_size,
            max_context=max_context,
            max_preemptions=max_preemptions,
            prompt_allowance=prompt_allowance,
        )
        self.live: list[Sequence] = []
        self.told: list[Emission] = []
        self.num_steps = 0

    def add(self, new: Sequence, wants: Intake = Intake.LOCAL) -> Sequence:
        self.add_choices([new], wants)
        return new

    def add_choices(self, choices: list[Sequence], wants: Intake = Intake.LOCAL) -> list[Sequence]:
        """Add the choices of one request; the first one leads."""
        self.scheduler.add(choices[0], wants, choices[1:])
        self.live += choices
        return choices

    def step(self, *nan: str) -> StepPlan:
        self.scheduler.admit()
        plan = self.scheduler.plan()
        result = self.runner.run(plan, self.live, frozenset(key(name) for name in nan))
        self.told += self.scheduler.settle(plan, result)
        self.num_steps += 1
        return plan

    def run_until_idle(self, max_steps: int = 1000) -> None:
        while self.scheduler.num_running + self.scheduler.num_waiting:
            assert self.num_steps < max_steps, "does not end"
            self.step()

    def output(self, name: str, choice: int = 0) -> list[int]:
        wanted = key(name, choice)
        return [token for emission in self.told if emission.key == wanted for token in emission.token_ids]

    def outputs(self, name: str, count: int = 2) -> list[list[int]]:
        return [self.output(name, choice) for choice in range(count)]

    def finish(self, name: str, choice: int = 0) -> FinishReason | None:
        wanted = key(name, choice)
        return next(emission.finish for emission in self.told if emission.key == wanted and emission.is_last)


def choices(
    name: str,
    prompt: list[int],
    count: int = 2,
    *,
    arrival: int = 0,
    max_tokens: int = 5,
    num_shown: tuple[int, ...] = (),
    runs_alone: bool = False,
    num_prompt_logprobs: int | None = None,
) -> list[Sequence]:
    """Return the choices of one request; the first `num_shown` tokens of each were shown before."""
    made = []
    for choice in range(count):
        shown = num_shown[choice] if num_shown else 0
        token_ids = prompt + (solo(prompt, shown, choice) if shown else [])
        made.append(
            sequence(
                name,
                token_ids,
                arrival=arrival,
                max_tokens=max_tokens,
                num_shown=shown,
                runs_alone=runs_alone,
                choice=choice,
                num_logprobs=0,
                num_prompt_logprobs=None if choice else num_prompt_logprobs,
            )
        )
    return made
