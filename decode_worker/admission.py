"""Who of those that wait gets a seat and pages. A part of the decode scheduler, and as pure.

The oldest one that waits comes first, and nobody overtakes it. The choices of a request count as many: their leader is
admitted when there are seats and pages for all of them, and what its followers will take is left alone by younger ones
until they have it. Older ones need not wait for them: they stand before them in the queue.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from common.errors import DoesNotFit
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.plan import BlockCopy
from common.scheduling.sequence import Sequence
from decode_worker.queues import Queues
from decode_worker.ticket import Intake, State, Ticket


@dataclass(frozen=True, slots=True)
class Admitted:
    """Sequences that were admitted: `reserved` ones are computed elsewhere first, `begun` ones run, as never before."""

    reserved: tuple[Sequence, ...]
    begun: tuple[Sequence, ...]


class Admission:
    """Admits from the head of the queue. `max_sequences` bounds the running and the reserved ones together."""

    def __init__(self, blocks: SequenceBlocks, queues: Queues, max_sequences: int, max_context: int) -> None:
        self._blocks = blocks
        self._queues = queues
        self._max_sequences = max_sequences
        self._max_context = max_context
        self._copies: list[BlockCopy] = []

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `DoesNotFit` if a request's choices could never be computed here, however long they wait."""
        leader, *followers = sequences
        capacity = min(self._blocks.capacity, self._max_context)
        for sequence in (leader, *followers):
            num_tokens = max(sequence.num_tokens, sequence.num_prompt + 1)
            if num_tokens > capacity or sequence.num_tokens >= self._max_context:
                raise DoesNotFit(num_tokens, capacity)
        num_tokens = self._blocks.num_spanned(leader, followers)
        if followers and num_tokens > self._blocks.capacity:
            raise DoesNotFit(num_tokens, self._blocks.capacity)

    def admit(self) -> Admitted:
        """Admit while there is room.

        A remote sequence that wants one token alone is reserved without pages: only its first token will come.
        """
        reserved: list[Sequence] = []
        begun: list[Sequence] = []
        waiting, running = self._queues.waiting, self._queues.running
        num_owed = sum(self._blocks.num_missing(ticket.sequence) for ticket in running)
        while waiting:
            ticket = waiting[0]
            if not self._is_company_right(ticket) or not self._take_room(ticket, num_owed):
                break
            match ticket.intake:
                case Intake.LOCAL:
                    self._queues.move(ticket, State.RUNNING)
                    if not ticket.sequence.num_preemptions:
                        begun.append(ticket.sequence)
                case Intake.REMOTE:
                    self._queues.move(ticket, State.RESERVED)
                    reserved.append(ticket.sequence)
                case _:
                    assert_never(ticket.intake)
        return Admitted(tuple(reserved), tuple(begun))

    @property
    def num_promised(self) -> int:
        """Pages that are left for those that follow a leader with a seat."""
        following = self._queues.following
        return sum(self._blocks.num_own(one.sequence) for one in following if one.choices.leader.has_seat)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return what is to be copied for those that were admitted since the last call. They left room for the next
        step of all others, so that none of them was preempted meanwhile."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def _is_company_right(self, ticket: Ticket) -> bool:
        """Whether the sequence may be computed beside those of other requests that have pages or will get them."""
        present = [other for other in self._queues.seated() if other.choices is not ticket.choices]
        if ticket.sequence.runs_alone:
            return not present
        return not any(other.sequence.runs_alone for other in present)

    def _take_room(self, ticket: Ticket, num_owed: int) -> bool:
        """Take pages for all tokens, leaving `num_owed` for one step of the running sequences, and what is promised.

        A sequence that was preempted leaves one page more per running sequence for each time: it comes back when the
        others have room to grow, not when the next step would push it out again.
        """
        queues, sequence = self._queues, ticket.sequence
        promised = self._promised_before(ticket)
        num_taken = len(queues.running) + len(queues.reserved)
        if num_taken + len(promised) >= self._max_sequences:
            return False
        if ticket.intake is Intake.REMOTE and _wants_one_token(ticket):
            return True
        num_spare = num_owed + self._num_promised(ticket, promised) + sequence.num_preemptions * len(queues.running)
        source = _source(ticket)
        if source is not None:
            return self._branch(sequence, source, num_spare)
        if not self._blocks.acquire(sequence, num_spare):
            return False
        if not ticket.choices.has_run:
            ticket.choices.num_cached = min(sequence.num_cached, sequence.num_prompt)
        return True

    def _promised_before(self, ticket: Ticket) -> list[Ticket]:
        """Return its own followers, and the older ones of leaders that were admitted."""
        return [
            follower
            for follower in self._queues.following
            if follower.choices is ticket.choices or (follower.choices.leader.has_seat and follower.age < ticket.age)
        ]

    def _num_promised(self, ticket: Ticket, promised: list[Ticket]) -> int:
        """Return how many pages are left for them: what those of others need, and its own ones to begin.

        Several answers that others have shown need not fit beside each other: they came about by taking turns.
        """
        blocks, choices = self._blocks, ticket.choices
        num_of_others = sum(blocks.num_own(one.sequence) for one in promised if one.choices is not choices)
        num_own = sum(blocks.num_to_begin(one.sequence) for one in promised if one.choices is choices)
        return num_of_others + min(num_own, blocks.num_beside(ticket.sequence))

    def _branch(self, sequence: Sequence, source: Sequence, num_spare: int) -> bool:
        copies = self._blocks.branch(sequence, source, num_spare)
        if copies is None:
            return False
        self._copies += copies
        return True


def _source(ticket: Ticket) -> Sequence | None:
    """Return the sequence that has the prompt's pages for a new choice. One that was preempted may hit more."""
    leader = ticket.choices.leader
    if leader is ticket or leader.state is not State.RUNNING or ticket.sequence.num_preemptions:
        return None
    return leader.sequence if leader.sequence.num_computed >= leader.sequence.num_prompt else None


def _wants_one_token(ticket: Ticket) -> bool:
    """Whether nothing but the first token is needed: others would want the prompt's pages."""
    sequence = ticket.sequence
    return sequence.sampling.max_tokens - sequence.num_generated == 1 and not ticket.choices.followers
