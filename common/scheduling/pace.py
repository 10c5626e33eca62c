"""How long the steps of an engine take, learnt from those that it has run. Pure; owned by the engine thread.

A step of `t` tokens that attend to `p` pairs takes `base + t * token + p * pair` seconds. The three are fitted by least
squares of the relative errors, none below zero. Steps are gathered by the size of their batch (powers of two), each
group as a running mean over its last `MEMORY` steps: a minute of decoding alone does not wash away what a prompt costs,
and a host that becomes busy is seen within some steps. What was measured under load contains the load.
"""

from dataclasses import dataclass, field
from itertools import combinations

from common.messages.registry import StepCost
from common.scheduling.plan import StepPlan

MEMORY = 16
"""Steps of one size that are remembered: half a second of decoding on a CPU."""

NUM_WARM_UP = 2
"""The first steps of a process fault in memory and choose kernels; they take several times as long as the next ones."""

MAX_AGE = 2048
"""Steps after which a size that was not seen again counts a `MIN_WEIGHT`."""

MIN_WEIGHT = 0.05
REFIT = 4
"""A fit takes 0.1 ms; it is made anew after so many steps, and after each one while there are few."""

OUTLIER = 4.0
"""A step that took this many times what was expected was interrupted: it counts as that much."""

_NUM_TERMS = 3
_BASE, _TOKENS, _PAIRS = range(_NUM_TERMS)
_SIMPLEST_FIRST = (_TOKENS, _BASE, _PAIRS)
"""After a single step it costs what its tokens do."""

_SCALES = (1.0, 1 / 256, 1 / 65536)
"""Of a step's 1, tokens and pairs: they bring the three unknowns to one order of magnitude."""

_RIDGE = 1e-4
"""Keeps a fit of few sizes solvable; relative to the diagonal."""

Vector = list[float]
Matrix = list[Vector]


@dataclass(slots=True)
class _Steps:
    """Means over steps of one size: products of their terms with each other, with the duration, and its square."""

    products: Matrix = field(default_factory=lambda: [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)])
    timed: Vector = field(default_factory=lambda: [0.0] * _NUM_TERMS)
    squared_s: float = 0.0
    num_seen: int = 0
    last_seen: int = 0

    def add(self, row: Vector, run_s: float) -> None:
        """Take in one step."""
        self.num_seen += 1
        share = 1 / min(self.num_seen, MEMORY)
        self.squared_s += share * (run_s * run_s - self.squared_s)
        for i, term in enumerate(row):
            self.timed[i] += share * (term * run_s - self.timed[i])
            products = self.products[i]
            for j, other in enumerate(row):
                products[j] += share * (term * other - products[j])


class PaceMeter:
    """Takes in steps and tells what one costs."""

    def __init__(self) -> None:
        self._steps: dict[int, _Steps] = {}
        self._num_steps = 0
        self._cost: StepCost | None = None
        self._num_fitted = 0
        """Steps that the last fit knew."""

    @property
    def cost(self) -> StepCost | None:
        """What a step costs by now; None before anything was measured."""
        num_new = self._num_steps - self._num_fitted
        if num_new >= REFIT or (num_new and self._num_steps < MEMORY):
            self._cost = self._fit()
            self._num_fitted = self._num_steps
        return self._cost

    def note(self, plan: StepPlan, run_s: float) -> None:
        """Take in a step that was computed in `run_s` seconds; one that nobody has measured (0) changes nothing."""
        if not plan or run_s <= 0:
            return
        self._num_steps += 1
        if self._num_steps > NUM_WARM_UP:
            self._take(plan.num_tokens, plan.num_pairs, run_s)

    def _take(self, num_tokens: int, num_pairs: int, run_s: float) -> None:
        if self._cost is not None:
            run_s = min(run_s, OUTLIER * self._cost.step_s(num_tokens, num_pairs))
        steps = self._steps.setdefault(num_tokens.bit_length(), _Steps())
        steps.last_seen = self._num_steps
        steps.add([term * scale for term, scale in zip((1, num_tokens, num_pairs), _SCALES, strict=True)], run_s)

    def _fit(self) -> StepCost | None:
        """Return the best of the fits that use some of the terms and need no negative one."""
        products, timed = self._sums()
        best, best_gain = None, 0.0
        for size in range(1, _NUM_TERMS + 1):
            for chosen in combinations(_SIMPLEST_FIRST, size):
                solution = _solve(products, timed, chosen)
                if solution is None or min(solution) < 0:
                    continue
                gain = sum(timed[i] * value for i, value in zip(chosen, solution, strict=True))
                if gain > best_gain * (1 + _RIDGE):  # of equally good ones the simplest
                    best, best_gain = dict(zip(chosen, solution, strict=True)), gain
        if best is None:
            return self._cost
        return StepCost(*(best.get(i, 0.0) * scale for i, scale in enumerate(_SCALES)))

    def _sums(self) -> tuple[Matrix, Vector]:
        products = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        timed = [0.0] * _NUM_TERMS
        for steps in self._steps.values():
            weight = max(MIN_WEIGHT, 1 - (self._num_steps - steps.last_seen) / MAX_AGE) / steps.squared_s
            for i in range(_NUM_TERMS):
                timed[i] += weight * steps.timed[i]
                for j in range(_NUM_TERMS):
                    products[i][j] += weight * steps.products[i][j]
        return products, timed


class TwinMeter:
    """Meters for two states of a host: whether others, who may share its cores, work for us at the same time or not.

    Whoever plans a step says so by `is_disturbed` before it begins. A state that was not measured yet is taken to be
    like the other one.
    """

    def __init__(self) -> None:
        self.is_disturbed = False
        self._quiet, self._disturbed = PaceMeter(), PaceMeter()

    @property
    def cost(self) -> StepCost | None:
        """What a step costs in the state that is."""
        return self.disturbed_cost if self.is_disturbed else self._quiet.cost or self._disturbed.cost

    @property
    def disturbed_cost(self) -> StepCost | None:
        """What a step costs while others work for us."""
        return self._disturbed.cost or self._quiet.cost

    def note(self, plan: StepPlan, run_s: float) -> None:
        """Take in a step that was planned in the state that is."""
        (self._disturbed if self.is_disturbed else self._quiet).note(plan, run_s)


def _solve(products: Matrix, timed: Vector, chosen: tuple[int, ...]) -> Vector | None:
    """Return the least-squares factors of the chosen terms, None where they cannot be told apart."""
    rows = [[products[i][j] * (1 + _RIDGE * (i == j)) for j in chosen] + [timed[i]] for i in chosen]
    size = len(rows)
    for pivot in range(size):  # Gaussian elimination; the matrix is positive definite, so no rows change places
        if rows[pivot][pivot] <= 0:
            return None
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [low - factor * high for low, high in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
