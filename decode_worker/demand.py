"""What a decode worker has to compute, in numbers: by its queues."""

from dataclasses import dataclass

from decode_worker.placing import Backlog
from decode_worker.queues import Queues
from decode_worker.ticket import Intake, Ticket


@dataclass(frozen=True, slots=True)
class Demand:
    """`num_decoding` sequences want one token each, which attends to `num_pairs` pairs in all. Prompts are computed
    `here`, or, for us, `there` by a prefill worker; each may have to wait for room first."""

    num_decoding: int
    num_pairs: int
    here: Backlog
    there: Backlog


def demand_of(queues: Queues) -> Demand:
    """Return the demand of these queues; choices that follow wait for a prompt that is counted already."""
    decoding = [ticket for ticket in queues.running if ticket.sequence.num_uncomputed == 1]
    here = [ticket for ticket in queues.running if ticket.sequence.num_uncomputed > 1]
    here += [ticket for ticket in queues.waiting if ticket.intake is Intake.LOCAL]
    there = [*queues.reserved, *(ticket for ticket in queues.waiting if ticket.intake is Intake.REMOTE)]
    return Demand(
        len(decoding), sum(ticket.sequence.num_tokens for ticket in decoding), _backlog(here), _backlog(there)
    )


def _backlog(tickets: list[Ticket]) -> Backlog:
    return Backlog(len(tickets), sum(ticket.sequence.num_uncomputed for ticket in tickets))
