"""Which sequences a decode worker runs in the next step. Pure; owned by the engine thread.

The life of a sequence:

1. `add` puts it into one queue ordered by age (`arrival`), saying where it wants to be prefilled.
2. `admit` takes from the head of that queue while a seat and pages for all its tokens are there: the cached prefix is
   pinned, the missing pages are taken. A local sequence then runs; a remote one is *reserved* until its pages have
   come. Nobody overtakes the head, so nobody waits for ever. One that runs alone is admitted when nobody else runs or
   is reserved, and nobody else while it runs.
3. A reserved sequence becomes a running one by `activate` (pages and first token have come) or by `fall_back` (it
   computes its prompt here). `conclude` ends it where the first token already is the last one.
4. `plan` gives every decoding sequence one token and prompts a chunk each. Where pages run out, the youngest running
   sequence is preempted: it keeps its tokens, goes back to the queue and computes them again later.
5. `settle` appends the sampled tokens and tells about each; what is over has released its pages.

The engine calls, in this order: commands (`add`, `activate`, `fall_back`, `conclude`, `cancel`), `admit`, `plan`, run,
`settle`. An empty plan is settled, too: something may have failed while planning. Commands run between `settle` and
`admit`; only `cancel` may also come between run and `settle`, because pages are taken again by `admit` and `plan` alone
(the cancelled sequence's part of the result is ignored).
"""

import enum
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit, InvalidSetting
from common.messages.chain import chain_of, extend_chain
from common.messages.ids import BlockId
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.plan import Chunk, StepPlan, StepResult
from common.scheduling.sequence import FinishReason, Sequence, SequenceKey

MAX_PREEMPTIONS = 8
"""Each preemption asks for more room before the next admission, so that a sequence rarely comes near this."""


class Intake(enum.Enum):
    """Where a sequence wants its prompt computed."""

    LOCAL = "local"
    REMOTE = "remote"


class _State(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    OVER = "over"


@dataclass(eq=False, slots=True)
class _Ticket:
    """A sequence and what the scheduler knows about it. `chain` hashes the tokens generated so far."""

    sequence: Sequence
    intake: Intake
    state: _State
    chain: int
    num_cached: int = 0
    """Prompt tokens found in a prefix cache when it was first admitted."""


def _age(ticket: _Ticket) -> int:
    return ticket.sequence.arrival


def _wants_one_token(sequence: Sequence) -> bool:
    return sequence.sampling.max_tokens - sequence.num_generated == 1


class DecodeScheduler:
    """Continuous batching over one pool. `max_context` and the pool's capacity end a sequence with `LENGTH`.

    `token_budget` bounds the tokens of one step, `chunk_size` one sequence's share of it, `max_sequences` the running
    and reserved sequences together.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixCache,
        *,
        block_size: int,
        max_sequences: int,
        token_budget: int,
        chunk_size: int,
        max_context: int,
        max_preemptions: int = MAX_PREEMPTIONS,
    ) -> None:
        if token_budget < max_sequences:
            raise InvalidSetting("token_budget", token_budget, f"must be at least max_sequences ({max_sequences})")
        self._blocks = SequenceBlocks(pool, prefix, block_size)
        self._max_sequences = max_sequences
        self._token_budget = token_budget
        self._chunk_size = chunk_size
        self._max_tokens_held = min(max_context, self._blocks.capacity + 1)
        self._max_context = max_context
        self._max_preemptions = max_preemptions
        self._tickets: dict[SequenceKey, _Ticket] = {}
        self._queues: dict[_State, list[_Ticket]] = {state: [] for state in _State if state is not _State.OVER}
        """Oldest first."""
        self.num_preemptions = 0
        """Preemptions so far."""
        self._failed: list[Emission] = []
        """Decided while planning, told by `settle`."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._queues[_State.RUNNING])

    @property
    def num_waiting(self) -> int:
        """Sequences without pages: new ones and preempted ones."""
        return len(self._queues[_State.WAITING])

    @property
    def num_reserved(self) -> int:
        """Sequences whose prompt is computed elsewhere."""
        return len(self._queues[_State.RESERVED])

    @property
    def is_exclusive(self) -> bool:
        """Whether a sequence that runs alone is here, waiting or running."""
        return any(ticket.sequence.runs_alone for ticket in self._tickets.values())

    def sequence(self, key: SequenceKey) -> Sequence | None:
        """Return the sequence of that key, or None when it is over or was never here."""
        ticket = self._tickets.get(key)
        return ticket.sequence if ticket else None

    def unstarted(self) -> list[SequenceKey]:
        """Return those that have never run here, oldest first: waiting for room, or for a prefill elsewhere."""
        queued = (*self._queues[_State.WAITING], *self._queues[_State.RESERVED])
        return [ticket.sequence.key for ticket in sorted(queued, key=_age) if not ticket.sequence.num_preemptions]

    def displaced_by(self, suspect: SequenceKey) -> list[SequenceKey]:
        """Return those that must not wait for the end of a suspect, which may take the process with it, oldest first.

        They do not run now: those that do go on, and the suspect waits for them. If another one that runs alone is here
        already, it is the suspect itself that goes.
        """
        others = [ticket for key, ticket in self._tickets.items() if key != suspect]
        if any(other.sequence.runs_alone for other in others):
            return [suspect]
        return [other.sequence.key for other in sorted(others, key=_age) if other.state is not _State.RUNNING]

    def add(self, sequence: Sequence, wants: Intake = Intake.LOCAL) -> None:
        """Queue a new sequence by its age; it has no pages yet and at least one token left to generate.

        Raises `DoesNotFit` if it could never compute its next token here, however long it waits.
        """
        assert sequence.key not in self._tickets, f"{sequence.key} is here already"
        assert 0 <= sequence.num_generated < sequence.sampling.max_tokens, f"{sequence.key} has nothing to generate"
        assert wants is Intake.LOCAL or not sequence.runs_alone, f"{sequence.key} must not take others along"
        capacity = min(self._blocks.capacity, self._max_context)
        num_tokens = max(sequence.num_tokens, sequence.num_prompt + 1)
        if num_tokens > capacity or sequence.num_tokens >= self._max_context:
            raise DoesNotFit(num_tokens, capacity)
        ticket = _Ticket(sequence, wants, _State.WAITING, chain_of(sequence.token_ids[sequence.num_prompt :]))
        self._tickets[sequence.key] = ticket
        insort(self._queues[_State.WAITING], ticket, key=_age)

    def admit(self) -> list[Sequence]:
        """Admit from the head of the queue while there is room; return the remote sequences that are reserved now.

        A remote sequence that wants one token alone is reserved without pages: only its first token will come.
        """
        reserved: list[Sequence] = []
        waiting, running = self._queues[_State.WAITING], self._queues[_State.RUNNING]
        num_owed = sum(self._blocks.num_missing(ticket.sequence) for ticket in running)
        while waiting and self.num_running + self.num_reserved < self._max_sequences:
            ticket = waiting[0]
            if not self._is_company_right(ticket) or not self._take_blocks(ticket, num_owed):
                break
            match ticket.intake:
                case Intake.LOCAL:
                    self._move(ticket, _State.RUNNING)
                case Intake.REMOTE:
                    self._move(ticket, _State.RESERVED)
                    reserved.append(ticket.sequence)
                case _:
                    assert_never(ticket.intake)
        return reserved

    def activate(self, key: SequenceKey, token: int, num_cached: int = 0) -> Emission | None:
        """Let a reserved sequence run: all its pages are here, verified, and `token` is its first.

        `num_cached` is what the prefill worker found in its own prefix cache. The token may end the sequence at once.
        None, and nothing changes, if no such sequence is reserved (any more).
        """
        ticket = self._reserved(key)
        if ticket is None:
            return None
        sequence = ticket.sequence
        if sequence.block_ids:
            self._blocks.advance(sequence, sequence.num_uncomputed)
        self._move(ticket, _State.RUNNING)
        return self._append(ticket, token, num_cached)

    def conclude(self, key: SequenceKey, token: int, num_cached: int = 0) -> Emission | None:
        """End a reserved sequence whose first token is its last, whether or not its pages are here.

        None, and nothing changes, if the token does not end it or no such sequence is reserved (any more).
        """
        ticket = self._reserved(key)
        if ticket is None or self._finish(ticket.sequence, token) is None:
            return None
        return self._append(ticket, token, num_cached)

    def fall_back(self, key: SequenceKey, *, alone: bool = False) -> bool:
        """Compute the prompt of a reserved or waiting remote sequence here; False if there is none of that key.

        It keeps its pages. Call it when nothing writes into them any more. If `alone`, it gives them back and waits
        until it can run beside nobody.
        """
        ticket = self._tickets.get(key)
        if ticket is None or ticket.intake is Intake.LOCAL or ticket.state is _State.RUNNING:
            return False
        sequence = ticket.sequence
        ticket.intake = Intake.LOCAL
        if alone:
            sequence.runs_alone = True
            self._blocks.release(sequence)
        if ticket.state is _State.RESERVED:
            # Reserved for one token alone, it has no pages and must wait for some.
            self._move(ticket, _State.RUNNING if sequence.block_ids else _State.WAITING)
        return True

    def cancel(self, key: SequenceKey) -> bool:
        """Drop a sequence in any state and release its pages; False if it is over or was never here. Idempotent."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return False
        self._leave(ticket)
        return True

    def plan(self) -> StepPlan:
        """Decide the next step: one token per decoding sequence, then prompt chunks, within the token budget."""
        running = self._queues[_State.RUNNING]
        decoding: list[_Ticket] = []
        catching_up: list[_Ticket] = []
        for ticket in running:
            (decoding if ticket.sequence.num_uncomputed == 1 else catching_up).append(ticket)
        chunks = [
            Chunk(ticket.sequence, ticket.sequence.num_computed, 1, samples=True)
            for ticket in decoding
            if ticket.state is _State.RUNNING and self._find_room(ticket)
        ]
        chunks += self._prompt_chunks(catching_up, self._token_budget - len(chunks))
        return StepPlan(tuple(chunks))

    def settle(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Close a step: record what is computed, append sampled tokens, end what is over."""
        emissions = self._failed
        self._failed = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            ticket = self._tickets.get(sequence.key)
            if ticket is None or ticket.sequence is not sequence:
                continue  # cancelled while the step ran
            if sequence.key in result.invalid:
                self._blocks.forget(sequence)
                emissions.append(self._fail(ticket, FailureCode.INVALID_LOGITS))
                continue
            self._blocks.advance(sequence, chunk.length)
            if chunk.samples:
                emissions.append(self._append(ticket, result.tokens[sequence.key]))
        return emissions

    def violations(self, copies: Iterable[Iterable[BlockId]] = ()) -> list[str]:
        """Return what is wrong with the accounts of the blocks and the queues, one text each. For idle times.

        `copies` hold the blocks that receivers own beside the sequences.
        """
        queued = [ticket for queue in self._queues.values() for ticket in queue]
        texts = self._blocks.violations([ticket.sequence for ticket in self._tickets.values()], copies)
        if {ticket.sequence.key for ticket in queued} != self._tickets.keys() or len(queued) != len(self._tickets):
            texts.append(f"{len(self._tickets)} sequences stand {len(queued)} times in the queues")
        texts += [
            f"{ticket.sequence.key} waits and has {len(ticket.sequence.block_ids)} blocks"
            for ticket in self._queues[_State.WAITING]
            if ticket.sequence.block_ids
        ]
        return texts

    def _reserved(self, key: SequenceKey) -> _Ticket | None:
        ticket = self._tickets.get(key)
        return ticket if ticket and ticket.state is _State.RESERVED else None

    def _is_company_right(self, ticket: _Ticket) -> bool:
        """Whether the sequence may be computed beside those that have pages or are about to get them."""
        present = (*self._queues[_State.RUNNING], *self._queues[_State.RESERVED])
        if ticket.sequence.runs_alone:
            return not present
        return not any(other.sequence.runs_alone for other in present)

    def _take_blocks(self, ticket: _Ticket, num_owed: int) -> bool:
        """Take pages for all tokens, leaving `num_owed` for one step of the running sequences.

        A sequence that was preempted leaves one page more per running sequence for each time: it comes back when the
        others have room to grow, not when the next step would push it out again.
        """
        sequence = ticket.sequence
        if ticket.intake is Intake.REMOTE and _wants_one_token(sequence):
            return True
        if not self._blocks.acquire(sequence, num_owed + sequence.num_preemptions * self.num_running):
            return False
        if not sequence.num_preemptions:
            ticket.num_cached = min(sequence.num_cached, sequence.num_prompt)
        return True

    def _find_room(self, ticket: _Ticket) -> bool:
        """Take the page that the next token needs, from younger sequences if need be.

        The youngest one waits with what it has instead of preempting itself, which would only repeat its work.
        """
        running = self._queues[_State.RUNNING]
        while not self._blocks.grow(ticket.sequence):
            youngest = running[-1]
            if youngest is ticket:
                return False
            self._preempt(youngest)
        return True

    def _prompt_chunks(self, tickets: Iterable[_Ticket], budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for ticket in tickets:
            if not budget:
                break
            if ticket.state is not _State.RUNNING:
                continue
            sequence = ticket.sequence
            length = min(sequence.num_uncomputed, self._chunk_size, budget)
            samples = length == sequence.num_uncomputed
            chunks.append(Chunk(sequence, sequence.num_computed, length, samples))
            budget -= length
        return chunks

    def _preempt(self, ticket: _Ticket) -> None:
        sequence = ticket.sequence
        if sequence.num_preemptions == self._max_preemptions:
            self._failed.append(self._fail(ticket, FailureCode.PREEMPTED))
            return
        self._blocks.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        ticket.intake = Intake.LOCAL
        self._move(ticket, _State.WAITING)

    def _append(self, ticket: _Ticket, token: int, num_cached: int = 0) -> Emission:
        sequence = ticket.sequence
        finish = self._finish(sequence, token)
        if num_cached > ticket.num_cached:
            ticket.num_cached = num_cached
        emission = Emission(
            sequence.key, sequence.num_generated, (token,), ticket.chain, finish=finish, num_cached=ticket.num_cached
        )
        sequence.token_ids.append(token)
        ticket.chain = extend_chain(ticket.chain, token)
        if finish is not None:
            self._leave(ticket)
        return emission

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Return why the sequence is over with `token`, if it is."""
        sampling = sequence.sampling
        if token in sampling.stop_ids:
            return FinishReason.STOP
        if sequence.num_generated + 1 >= sampling.max_tokens or sequence.num_tokens + 1 >= self._max_tokens_held:
            return FinishReason.LENGTH
        return None

    def _fail(self, ticket: _Ticket, failure: FailureCode) -> Emission:
        sequence = ticket.sequence
        self._leave(ticket)
        return Emission(
            sequence.key,
            sequence.num_generated,
            (),
            ticket.chain,
            failure=failure,
            num_cached=ticket.num_cached,
        )

    def _leave(self, ticket: _Ticket) -> None:
        self._blocks.release(ticket.sequence)
        self._queues[ticket.state].remove(ticket)
        ticket.state = _State.OVER
        del self._tickets[ticket.sequence.key]

    def _move(self, ticket: _Ticket, state: _State) -> None:
        self._queues[ticket.state].remove(ticket)
        ticket.state = state
        insort(self._queues[state], ticket, key=_age)
