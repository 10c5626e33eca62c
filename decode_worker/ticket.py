"""What a decode scheduler knows about one sequence, and about the choices of one request together.

Owned by the scheduler; the states are changed by `decode_worker.queues` alone.
"""

import enum
from dataclasses import dataclass, field

from common.messages.chain import chain_of
from common.messages.ids import ChoiceIndex
from common.scheduling.sequence import Sequence


class Intake(enum.Enum):
    """Where a sequence wants its prompt computed."""

    LOCAL = "local"
    REMOTE = "remote"


class State(enum.Enum):
    """Where a sequence stands."""

    FOLLOWING = "following"
    """Without pages and in no line: it joins when the leader of its request has the prompt."""
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    OVER = "over"


@dataclass(eq=False, slots=True)
class Ticket:
    """A sequence and how it stands. `chain` hashes the tokens generated so far."""

    sequence: Sequence
    intake: Intake
    choices: "Choices"
    state: State
    chain: int = field(init=False)

    def __post_init__(self) -> None:
        self.chain = chain_of(self.sequence.token_ids[self.sequence.num_prompt :])

    @property
    def age(self) -> tuple[int, ChoiceIndex]:
        """Orders tickets: the smaller one is older."""
        return self.sequence.arrival, self.sequence.key.choice

    @property
    def has_seat(self) -> bool:
        """Whether it is computed here, or elsewhere for us."""
        return self.state is State.RUNNING or self.state is State.RESERVED


@dataclass(eq=False, slots=True)
class Choices:
    """The sequences of one request here that are not over. `leader` has the prompt computed, the others follow."""

    leader: Ticket = field(init=False)
    tickets: list[Ticket] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens found in a prefix cache when the leader was first admitted."""
    has_run: bool = False
    """Whether one of them was computed here."""

    @property
    def followers(self) -> list[Ticket]:
        """Return those that wait for the leader's prompt."""
        return [ticket for ticket in self.tickets if ticket.state is State.FOLLOWING]
