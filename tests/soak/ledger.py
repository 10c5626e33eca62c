"""What a soak has seen: outcomes by name, disturbances with their times, and everything that was wrong."""

import time
from collections import Counter
from dataclasses import dataclass, field

from tests.soak.schedule import Kind

SETTLE_S = 10.0
"""So long after everything is ready again a new request may still meet what a fault has left."""


@dataclass(eq=False)
class Disturbance:
    """A fault: what, whom, and from when until everything was ready again (monotonic; None: not yet).

    `ends_life`: of its target, which comes back.
    """

    kind: Kind
    target: str
    began: float
    over: float | None = None
    ends_life: bool = False

    def touches(self, began: float, ended: float, settle_s: float = SETTLE_S) -> bool:
        """Whether what went on between two instants may have met it."""
        return ended >= self.began and (self.over is None or began <= self.over + settle_s)


@dataclass(frozen=True)
class Problem:
    """Something that must not happen. `at_s`: since the start of the soak, as `when` in the schedule of faults."""

    at_s: float
    what: str
    detail: str


@dataclass(eq=False)
class Ledger:
    """Written by everybody. `started` is the beginning of the soak (monotonic)."""

    started: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    """Right answers by name of the question."""
    disturbances: list[Disturbance] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def wrong(self, what: str, detail: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(round(self.now_s, 1), what, detail))

    def disturb(self, kind: Kind, target: str, *, ends_life: bool = False) -> Disturbance:
        """Note that a fault begins now."""
        disturbance = Disturbance(kind, target, time.monotonic(), ends_life=ends_life)
        self.disturbances.append(disturbance)
        return disturbance

    def may_fail(self, began: float, ended: float) -> bool:
        """Whether a request may have met a fault."""
        return any(each.touches(began, ended) for each in self.disturbances)

    def may_break(self, gateway: str, began: float, ended: float, *, is_answered: bool) -> bool:
        """Whether a gateway may have broken a connection; one that is asked to leave ends what it answers already."""
        return any(
            each.target == gateway
            and each.ends_life
            and each.touches(began, ended, settle_s=0.0)
            and not (is_answered and each.kind == Kind.TERMINATE)
            for each in self.disturbances
        )

    def around(self, began: float, ended: float) -> str:
        """Return the faults that a request may have met, with their times since the start."""
        met = [each for each in self.disturbances if each.touches(began, ended)]
        return "; ".join(
            f"{each.kind} {each.target} {each.began - self.started:.1f}-"
            + ("..." if each.over is None else f"{each.over - self.started:.1f}")
            for each in met
        )
