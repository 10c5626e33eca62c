"""How a placement can be lost, and whether that counts against its request."""

import enum
from dataclasses import dataclass


class Contradiction(Exception):
    """What a worker says about a placement does not go with what is known: it cannot go on with it."""


class LossReason(enum.StrEnum):
    """Why a placement was given up. The values are those of the failover metric (`FAILOVER_REASONS`)."""

    LOST = "lost"
    """Its worker is gone, or was silent for too long."""
    STALLED = "stalled"
    """Its worker's engine makes no progress."""
    DRAINED = "drained"
    """Its worker is leaving."""
    DISPLACED = "displaced"
    """Its worker computes a request that runs alone."""
    FAILED = "failed"
    """Its worker could not go on with it."""
    REFUSED = "refused"
    """Its worker's tokens do not continue what was shown."""
    UNACCEPTED = "unaccepted"
    """No worker that may have it has confirmed it."""


@dataclass(frozen=True, slots=True)
class PlacementLost:
    """The current placement cannot go on; another one may.

    `is_failure`: it uses up the request's failure budget. That is for what a request may have caused, so that one which
    ends its workers cannot go on doing so. A worker that leaves or makes room for a suspect, an emptied Redis, or a
    pause of this very process are nobody's failure.
    """

    reason: LossReason
    text: str
    is_failure: bool = True
