"""The decode worker's policy inside the engine thread: commands from the edge, events for it.

Pages that a receiver may be writing into have two owners, the sequence and the receiver; the receiver's share ends with
`LetGo`, so a cancelled sequence's pages reach nobody else while a copy is still running.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.messages.ids import BlockId, EntryId
from common.runtime.engine import EngineLoad
from common.runtime.staging import NoStaging, Staging
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.pace import TwinMeter
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import PlacementKey, Sequence, SequenceKey
from decode_worker.first_token import FirstToken
from decode_worker.placing import Decision, Here, Place, Placing, There
from decode_worker.scheduler import DecodeScheduler
from decode_worker.ticket import Intake


@dataclass(frozen=True, slots=True)
class Admit:
    """Take over a request: the choice that leads, and those that follow. It may be prefilled elsewhere if
    `may_go_remote`, which costs what `there` tells, if that is known."""

    leader: Sequence
    may_go_remote: bool
    followers: tuple[Sequence, ...] = ()
    there: There | None = None


@dataclass(frozen=True, slots=True)
class Absorb:
    """The job of this stream entry has been taken in by the commands before this one."""

    entry: EntryId


@dataclass(frozen=True, slots=True)
class Activate:
    """`first` is the sequence's next token, and every page is in place, unless it is its last and nobody follows."""

    key: SequenceKey
    first: FirstToken


@dataclass(frozen=True, slots=True)
class FallBack:
    """Prefill the sequence here after all; no copy into its pages runs any more. If `alone`, beside nobody."""

    key: SequenceKey
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The sequence has failed where it was prefilled, and would here."""

    key: SequenceKey
    failure: FailureCode


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget one choice, whatever its state; the others go on."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class CancelAll:
    """Forget every choice of the placement."""

    placement: PlacementKey


@dataclass(frozen=True, slots=True)
class LetGo:
    """The receiver has stopped writing into the sequence's pages for good."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker is leaving: name the sequences that have not begun to run here."""


Command = Admit | Absorb | Activate | FallBack | Fail | Cancel | CancelAll | LetGo | Leave


@dataclass(frozen=True, slots=True)
class Reserved:
    """Pages are set aside for a remote prefill: `block_ids` hold the blocks from `first_block` on."""

    key: SequenceKey
    first_block: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """The sequence is computed here from now on."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Refused:
    """The sequence can never run here."""

    key: SequenceKey
    reason: str


@dataclass(frozen=True, slots=True)
class Displaced:
    """The sequence's placement waits or is received where a suspect will run alone; its edge gives it back."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Unstarted:
    """The sequence's placement has not begun to run here; its edge hands it back."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Placed:
    """It is decided where the prompt of the sequence's request is computed."""

    key: SequenceKey
    decision: Decision


Event = Placed | Reserved | Begun | Refused | Displaced | Unstarted | Emission


class DecodeCore:
    """Drives a `DecodeScheduler`; see `common.runtime.engine.Core`."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        pool: BlockPool,
        prefix: PrefixCache,
        block_size: int,
        placing: Placing,
        staging: Staging | None = None,
        pace: TwinMeter | None = None,
    ) -> None:
        """`pace` takes in what the steps cost; the scheduler may plan by the same one."""
        self._scheduler = scheduler
        self._pool = pool
        self._prefix = prefix
        self._block_size = block_size
        self._placing = placing
        self._pace = pace or TwinMeter()
        self._staging = staging or NoStaging()
        self._lent: dict[SequenceKey, tuple[BlockId, ...]] = {}
        self._absorbed: EntryId | None = None

    def obey(self, command: Command) -> Iterable[Event]:
        """Apply one command."""
        match command:
            case Admit():
                return self._admit(command)
            case Absorb(entry):
                self._absorbed = entry
            case Activate():
                return self._activate(command)
            case FallBack(key, alone):
                is_here = self._scheduler.fall_back(key, alone=alone)
                return self._displaced_by(key) if is_here and alone else ()
            case Fail(key, failure):
                emission = self._scheduler.fail(key, failure)
                return () if emission is None else (emission,)
            case Cancel(key):
                self._scheduler.cancel(key)
            case CancelAll(placement):
                self._scheduler.cancel_all(placement)
            case LetGo(key):
                self._let_go(key)
            case Leave():
                return [Unstarted(key) for key in self._scheduler.unstarted()]
            case _:
                assert_never(command)
        return ()

    def plan(self) -> tuple[StepPlan, Iterable[Event]]:
        """Admit what fits now, lending the pages of remote prefills, then plan a step."""
        admitted = self._scheduler.admit()
        events: list[Event] = [self._lend(sequence) for sequence in admitted.reserved]
        events += [Begun(sequence.key) for sequence in admitted.begun]
        self._pace.is_disturbed = self._scheduler.num_reserved > 0
        return self._scheduler.plan(), events

    def settle(self, plan: StepPlan, result: StepResult) -> Iterable[Event]:
        """Return the tokens of the step."""
        self._pace.note(plan, result.run_s)
        return self._scheduler.settle(plan, result)

    def load(self, num_steps: int) -> EngineLoad:
        """Return how full the engine is."""
        return EngineLoad(
            blocks_total=self._pool.num_total,
            blocks_free=max(0, self._pool.num_free - self._scheduler.num_promised),
            blocks_cached=self._pool.num_cached,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_reserved=self._scheduler.num_reserved,
            num_steps=num_steps,
            absorbed=self._absorbed,
            num_preemptions=self._scheduler.num_preemptions,
            num_quarantined=self._num_quarantined(),
            is_exclusive=self._scheduler.is_exclusive,
            num_uncomputed=self._scheduler.demand.here.num_tokens,
            step_cost=self._pace.cost,
        )

    def check(self) -> list[str]:
        """Return what is wrong with the accounts of the blocks."""
        return self._scheduler.violations(self._lent.values())

    def _num_quarantined(self) -> int:
        """Return how many blocks only a receiver owns: their sequences are over, or have given them back."""
        total = 0
        for key, blocks in self._lent.items():
            sequence = self._scheduler.sequence(key)
            if sequence is None or not sequence.block_ids:
                total += len(blocks)
        return total

    def _admit(self, command: Admit) -> Iterable[Event]:
        leader = command.leader
        may_go_remote = command.may_go_remote and not leader.runs_alone
        decision = self._decide(leader, command.there, may_go=may_go_remote)
        wants = Intake.REMOTE if decision.place is Place.THERE else Intake.LOCAL
        try:
            self._scheduler.add(leader, wants, command.followers)
        except DoesNotFit as error:
            return (Refused(leader.key, str(error)),)
        displaced = self._displaced_by(leader.key) if leader.runs_alone else ()
        return (Placed(leader.key, decision), *displaced)

    def _decide(self, leader: Sequence, there: There | None, *, may_go: bool) -> Decision:
        demand, cost = self._scheduler.demand, self._pace.cost
        disturbed = self._pace.disturbed_cost
        here = None if cost is None else Here(cost, demand.num_decoding, demand.num_pairs, demand.here, disturbed)
        if there is not None:  # what we have sent there lately is not in what they told last
            there = dataclasses.replace(there, backlog=there.backlog.or_more(demand.there))
        num_tokens = self._num_uncached(leader)
        num_cached = leader.num_tokens - num_tokens
        return self._placing.decide(
            num_tokens, here, there, may_go=may_go, runs_alone=leader.runs_alone, num_cached=num_cached
        )

    def _displaced_by(self, suspect: SequenceKey) -> Iterable[Event]:
        return [Displaced(key) for key in self._scheduler.displaced_by(suspect)]

    def _num_uncached(self, sequence: Sequence) -> int:
        if sequence.wants_prompt_logprobs:  # each of its tokens has to be computed
            return sequence.num_tokens
        hit = self._prefix.match(sequence.token_ids, sequence.hash_chain, sequence.num_tokens - 1)
        self._pool.release(hit)
        return sequence.num_tokens - len(hit) * self._block_size

    def _activate(self, command: Activate) -> Iterable[Event]:
        emission = self._scheduler.conclude(command.key, command.first)
        if emission is None:
            self._staging.collect(self._lent.get(command.key, ()))
            emission = self._scheduler.activate(command.key, command.first)
        return () if emission is None else (emission,)

    def _lend(self, sequence: Sequence) -> Reserved:
        first_block = sequence.num_cached // self._block_size
        missing = tuple(sequence.block_ids[first_block:])
        self._pool.share(missing)
        self._lent[sequence.key] = missing
        return Reserved(sequence.key, first_block, missing)

    def _let_go(self, key: SequenceKey) -> None:
        self._pool.release(self._lent.pop(key, ()))
