"""Where a prompt is computed: in our own decode steps, or by a prefill worker. Pure: no clock, no state.

Both places are priced in seconds until the first token:

- *here* the prompt's chunks ride in the steps of the running batch, each as long as the inter-token target allows. It
  pays for the prompts that are being computed already, for its own tokens, and for what the batch takes in each of
  these steps anyway. Where even the shortest chunk makes a step longer than the target, every running sequence is
  delayed by the rest; these seconds are added, for each of them.
- *there* it pays for what waits at the prefill workers, for its own steps, for its pages' way over the link as far as
  that is not hidden behind later chunks, and for the hand-over itself (messages, waiting for a step). What is cached
  here is taken to be missing there: prefill workers do not have the answers of a conversation, nor what we computed.
  A prefill worker that shares our cores makes our steps longer; where they exceed the target the delay is added, too.

Prompts that are computed together share the steps fairly (see both schedulers): one of `n` tokens waits for at most `n`
tokens of each other one. The cheaper place wins; of two equal ones ours.
"""

import enum
from dataclasses import dataclass

from common.messages.registry import StepCost

MIN_CHUNK = 32
"""Tokens of prompts that a step computes at least, whatever the running batch would like: a prompt must end, too."""


class Place(enum.StrEnum):
    """Who computes a prompt."""

    HERE = "local"
    THERE = "remote"


class Reason(enum.StrEnum):
    """Why it is computed there."""

    SETTING = "setting"
    """`--disaggregation always` or `never`."""
    ALONE = "alone"
    """It runs beside nobody: processes have died over it."""
    ABSENT = "absent"
    """There is no prefill worker."""
    SHORT = "short"
    """It has at most `--local-prefill-max-tokens` tokens to compute."""
    CACHED = "cached"
    """It is not known yet what a step costs there, and more of the prompt is cached here than is not."""
    UNMEASURED = "unmeasured"
    """It is not known yet what a step costs there."""
    PROBE = "probe"
    """Nothing was prefilled elsewhere lately: whether that works, and what it costs, is found out by a short prompt."""
    COST = "cost"
    """The other place would have taken longer."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Prompts that wait or are being computed, and their tokens that are not computed yet."""

    num_prompts: int = 0
    num_tokens: int = 0

    def tokens_before(self, num_tokens: int) -> int:
        """Return how many of these are computed before a new prompt of `num_tokens` tokens is complete."""
        return min(self.num_tokens, self.num_prompts * num_tokens)

    def or_more(self, other: "Backlog") -> "Backlog":
        """Return the larger one of either number: two looks at the same backlog, each of which may be late."""
        return Backlog(max(self.num_prompts, other.num_prompts), max(self.num_tokens, other.num_tokens))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one step may compute: of one prompt, and in all. `itl_target_s` is how long a step with running sequences
    should take at most."""

    chunk_size: int
    token_budget: int
    itl_target_s: float

    def num_steps(self, num_own: int, num_all: int, num_per_step: int) -> int:
        """Return how many steps a prompt of `num_own` tokens needs, computed together with `num_all`, its own
        included."""
        return max(-(-num_own // self.chunk_size), -(-num_all // num_per_step))


@dataclass(frozen=True, slots=True)
class Here:
    """Our engine: the sequences that decode and the pairs of their next step, and the prompts that it computes.

    A step costs `cost` now, and `disturbed` while a prefill worker computes for us, which may share our cores; None: no
    more than that.
    """

    cost: StepCost
    num_decoding: int = 0
    num_pairs: int = 0
    backlog: Backlog = Backlog()
    disturbed: StepCost | None = None


@dataclass(frozen=True, slots=True)
class There:
    """The prefill workers: `num_workers` with `backlog` tokens in all, whose steps cost `cost` on average.

    `token_bytes` of pages per token come over a link of `link_bytes_per_s` (None: not measured, taken as free);
    `handover_s` is what a hand-over took lately beside that. `is_due`: nothing was handed over for a while.
    """

    cost: StepCost
    num_workers: int = 1
    backlog: Backlog = Backlog()
    token_bytes: int = 0
    link_bytes_per_s: float | None = None
    handover_s: float = 0.0
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class Price:
    """What a prompt costs at one place: seconds until its first token, and those by which all running sequences
    together are delayed meanwhile beyond their target."""

    first_token_s: float
    delay_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both together: what is compared."""
        return self.first_token_s + self.delay_s


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a prompt of `num_tokens` uncached tokens is computed, and what was expected of both places; None where
    nobody knows. The price of the other place contains `handover_s`."""

    place: Place
    reason: Reason
    num_tokens: int = 0
    here: Price | None = None
    there: Price | None = None
    handover_s: float = 0.0

    @property
    def expected_s(self) -> float | None:
        """When the first token is expected at the place that was chosen."""
        price = self.there if self.place is Place.THERE else self.here
        return None if price is None else price.first_token_s


def prompt_allowance(cost: StepCost | None, num_decoding: int, num_pairs: int, num_context: int, bounds: Bounds) -> int:
    """Return how many tokens of prompts a step may compute beside `num_decoding` sequences that decode.

    `num_pairs` are the pairs of these, `num_context` the tokens that each token of a prompt attends to. Without any
    sequence, or before steps were measured, as many as the budget allows.
    """
    if cost is None or not num_decoding:
        return bounds.token_budget
    token_s = cost.token_s + cost.pair_s * num_context
    left_s = bounds.itl_target_s - cost.step_s(num_decoding, num_pairs)
    if token_s <= 0 or left_s >= token_s * bounds.token_budget:
        return bounds.token_budget
    return max(min(MIN_CHUNK, bounds.token_budget), int(left_s / token_s))


def price_here(num_tokens: int, here: Here, bounds: Bounds) -> Price:
    """Return what a prompt of `num_tokens` uncached tokens costs if it is computed here."""
    cost = here.cost
    num_context = num_tokens // 2  # on average
    num_all = num_tokens + here.backlog.tokens_before(num_tokens)
    allowance = prompt_allowance(cost, here.num_decoding, here.num_pairs, num_context, bounds)
    num_steps = bounds.num_steps(num_tokens, num_all, allowance)
    batch_s = cost.step_s(here.num_decoding, here.num_pairs)
    token_s = cost.token_s + cost.pair_s * num_context
    excess_s = batch_s + token_s * min(allowance, num_all) - bounds.itl_target_s
    delay_s = here.num_decoding * num_steps * max(0.0, excess_s)
    return Price(num_steps * batch_s + token_s * num_all, delay_s)


def delay_there(compute_s: float, here: Here, bounds: Bounds) -> float:
    """Return by how much all running sequences together are delayed beyond their target while a prefill worker
    computes for `compute_s` seconds."""
    step_s = (here.disturbed or here.cost).step_s(here.num_decoding, here.num_pairs)
    if not here.num_decoding or step_s <= bounds.itl_target_s:
        return 0.0
    return here.num_decoding * compute_s * (1 - bounds.itl_target_s / step_s)


def seconds_there(num_tokens: int, there: There, bounds: Bounds, num_cached: int = 0) -> float:
    """Return when the first token of a prompt comes if a prefill worker computes it. `num_tokens` of it are missing
    here and come over the link, `num_cached` are computed there alone."""
    cost, num_own = there.cost, num_tokens + num_cached
    num_all = num_own + there.backlog.tokens_before(num_own) // there.num_workers
    num_steps = bounds.num_steps(num_own, num_all, bounds.token_budget)
    compute_s = num_steps * cost.base_s + cost.token_s * num_all + cost.pair_s * _pairs(num_own)
    if there.link_bytes_per_s is None:
        return compute_s + there.handover_s
    token_link_s = there.token_bytes / there.link_bytes_per_s
    tail_s = token_link_s * min(num_tokens, bounds.chunk_size)
    return max(compute_s + tail_s, token_link_s * num_tokens) + there.handover_s


@dataclass(frozen=True, slots=True)
class Placing:
    """The policy of one worker. `local_max` tokens are always computed here; a measured prefill worker is told as
    `There`, which `--disaggregation always` and `never` do not ask for: `is_measured` is False there."""

    bounds: Bounds
    local_max: int
    is_measured: bool = True

    def decide(
        self,
        num_tokens: int,
        here: Here | None,
        there: There | None,
        *,
        may_go: bool,
        runs_alone: bool = False,
        num_cached: int = 0,
    ) -> Decision:
        """Decide about a prompt of `num_tokens` tokens behind `num_cached` cached ones; without `may_go` it stays here.

        Before our own steps were measured they are taken to cost what those of the prefill workers do.
        """
        reason = self._reason_to_stay(num_tokens, may_go=may_go, runs_alone=runs_alone)
        if reason is not None:
            return Decision(Place.HERE, reason, num_tokens)
        if not self.is_measured:
            return Decision(Place.THERE, Reason.SETTING, num_tokens)
        if there is None:
            if num_cached > num_tokens:
                return Decision(Place.HERE, Reason.CACHED, num_tokens)
            return Decision(Place.THERE, Reason.UNMEASURED, num_tokens)
        return self._compare(num_tokens, num_cached, here or Here(there.cost), there)

    def _reason_to_stay(self, num_tokens: int, *, may_go: bool, runs_alone: bool) -> Reason | None:
        if runs_alone:
            return Reason.ALONE
        if not may_go:
            return Reason.ABSENT if self.is_measured else Reason.SETTING
        return Reason.SHORT if num_tokens <= self.local_max else None

    def _compare(self, num_tokens: int, num_cached: int, here: Here, there: There) -> Decision:
        there_s = seconds_there(num_tokens, there, self.bounds, num_cached)
        ours = price_here(num_tokens, here, self.bounds)
        theirs = Price(there_s, delay_there(there_s, here, self.bounds))
        place, reason = (Place.THERE if theirs.total_s < ours.total_s else Place.HERE), Reason.COST
        if place is Place.HERE and there.is_due and num_tokens + num_cached <= self.bounds.chunk_size:
            place, reason = Place.THERE, Reason.PROBE
        return Decision(place, reason, num_tokens, ours, theirs, there.handover_s)


def _pairs(num_tokens: int) -> int:
    """Return the pairs of the tokens of a prompt with one another."""
    return num_tokens * (num_tokens + 1) // 2
