"""The tickets of a decode scheduler, by key and by state. The only author of their states."""

from bisect import insort
from operator import attrgetter

from common.scheduling.sequence import PlacementKey, Sequence, SequenceKey
from decode_worker.ticket import Choices, Intake, State, Ticket

_AGE = attrgetter("age")


class Queues:
    """One queue per state, oldest first. The lists are to be read only."""

    def __init__(self) -> None:
        self.following: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.reserved: list[Ticket] = []
        self.running: list[Ticket] = []
        self._by_state = {
            State.FOLLOWING: self.following,
            State.WAITING: self.waiting,
            State.RESERVED: self.reserved,
            State.RUNNING: self.running,
        }
        self._tickets: dict[SequenceKey, Ticket] = {}
        self._choices: dict[PlacementKey, Choices] = {}

    def find(self, key: SequenceKey) -> Ticket | None:
        """Return the ticket of a sequence that is not over."""
        return self._tickets.get(key)

    def choices(self, placement: PlacementKey) -> Choices | None:
        """Return the choices of a placement that are not over."""
        return self._choices.get(placement)

    def tickets(self) -> list[Ticket]:
        """Return all that are not over."""
        return list(self._tickets.values())

    def seated(self) -> list[Ticket]:
        """Return those that have pages or are about to get them: the running and the reserved ones."""
        return [*self.running, *self.reserved]

    def placements(self) -> list[Choices]:
        """Return the choices of every placement, oldest first."""
        return sorted(self._choices.values(), key=lambda choices: choices.leader.age)

    def enter(self, leader: Sequence, wants: Intake, followers: tuple[Sequence, ...]) -> None:
        """Begin with a placement: its leader waits, the others follow."""
        choices = Choices()
        choices.leader = self._enter(Ticket(leader, wants, choices, State.WAITING))
        for follower in followers:
            self._enter(Ticket(follower, Intake.LOCAL, choices, State.FOLLOWING))
        self._choices[leader.key.of_placement] = choices

    def move(self, ticket: Ticket, state: State) -> None:
        """Put a ticket into another queue."""
        self._by_state[ticket.state].remove(ticket)
        ticket.state = state
        ticket.choices.has_run |= state is State.RUNNING
        insort(self._by_state[state], ticket, key=_AGE)

    def lead(self, ticket: Ticket, wants: Intake) -> None:
        """Let a follower have the prompt computed, because its leader is over."""
        ticket.intake = wants
        ticket.choices.leader = ticket
        self.move(ticket, State.WAITING)

    def leave(self, ticket: Ticket) -> None:
        """End a ticket."""
        key = ticket.sequence.key
        self._by_state[ticket.state].remove(ticket)
        ticket.state = State.OVER
        del self._tickets[key]
        ticket.choices.tickets.remove(ticket)
        if not ticket.choices.tickets:
            del self._choices[key.of_placement]

    def violations(self) -> list[str]:
        """Return what is wrong with the queues, one text each. For idle times."""
        queued = [ticket for queue in self._by_state.values() for ticket in queue]
        texts = []
        if {ticket.sequence.key for ticket in queued} != self._tickets.keys() or len(queued) != len(self._tickets):
            texts.append(f"{len(self._tickets)} sequences stand {len(queued)} times in the queues")
        texts += [
            f"{ticket.sequence.key} waits and has {len(ticket.sequence.block_ids)} blocks"
            for ticket in (*self.waiting, *self.following)
            if ticket.sequence.block_ids
        ]
        texts += [
            f"{ticket.sequence.key} follows {ticket.choices.leader.sequence.key}, which is over"
            for ticket in self.following
            if ticket.choices.leader.state is State.OVER
        ]
        return texts

    def _enter(self, ticket: Ticket) -> Ticket:
        self._tickets[ticket.sequence.key] = ticket
        ticket.choices.tickets.append(ticket)
        insort(self._by_state[ticket.state], ticket, key=_AGE)
        return ticket
