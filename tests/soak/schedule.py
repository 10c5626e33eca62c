"""Which faults a soak has, in which order, at whom and for how long: drawn by the seed, whatever the cluster does."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.support.fault_cluster import REDIS, Shape


class Kind(enum.StrEnum):
    """What happens."""

    KILL = "kill -9"
    TERMINATE = "SIGTERM"
    FREEZE = "SIGSTOP"
    EMPTY = "restart without its data"
    CUT = "connections cut"
    BLACK_HOLE = "link black-holed"
    HOLD_PAGES = "pages held"
    DELAY = "messages delayed"
    DUPLICATE = "messages duplicated"
    REORDER = "messages reordered"


ENDS_A_LIFE = frozenset({Kind.KILL, Kind.TERMINATE, Kind.EMPTY})
WORKER_WEIGHTS = {
    Kind.KILL: 4,
    Kind.TERMINATE: 3,
    Kind.FREEZE: 4,
    Kind.BLACK_HOLE: 3,
    Kind.HOLD_PAGES: 1,
    Kind.DELAY: 2,
    Kind.DUPLICATE: 2,
    Kind.REORDER: 2,
}
GATEWAY_WEIGHTS = {Kind.KILL: 3, Kind.TERMINATE: 2, Kind.FREEZE: 3}
REDIS_WEIGHTS = {Kind.EMPTY: 2, Kind.FREEZE: 2, Kind.CUT: 2}
ROLES = {"prefill": 4, "decode": 4, "gateway": 2, REDIS: 2}
LONGEST_S = {REDIS: 10.0}
"""Other processes are frozen for up to 15 s."""

DOUBLE = 0.25
"""How often a second fault hits another role before the first is over."""


@dataclass(frozen=True)
class Fault:
    """One fault. `pause_s` before it. `seed` is that of what it touches (messages)."""

    kind: Kind
    target: str
    duration_s: float
    pause_s: float
    seed: int


class Schedule:
    """An endless list of volleys of one fault or two. The processes of `elders` live as long as the soak does."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self._random = Random(f"{seed} faults")
        self._seats = {
            "prefill": [name for name in shape.workers if name.startswith("prefill")],
            "decode": [name for name in shape.workers if name.startswith("decode")],
            "gateway": shape.gateways,
            REDIS: [REDIS],
        }
        self.elders = {role: self._random.choice(seats) for role, seats in self._seats.items() if role != REDIS}

    def volleys(self) -> Iterator[tuple[Fault, ...]]:
        """Draw."""
        while True:
            role = self._role(ROLES)
            first = self._fault(role)
            others = {other: weight for other, weight in ROLES.items() if other != role}
            second = self._fault(self._role(others))
            yield (first, second) if self._random.random() < DOUBLE else (first,)

    def _role(self, weights: dict[str, int]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def _fault(self, role: str) -> Fault:
        weights = {"gateway": GATEWAY_WEIGHTS, REDIS: REDIS_WEIGHTS}.get(role, WORKER_WEIGHTS)
        kind = self._random.choices(list(weights), list(weights.values()))[0]
        seats = self._seats[role]
        if kind in ENDS_A_LIFE and len(seats) > 1:
            seats = [seat for seat in seats if seat != self.elders[role]]
        return Fault(
            kind,
            self._random.choice(seats),
            round(self._random.uniform(*self._durations(kind, role)), 1),
            round(self._random.uniform(1.0, 4.0), 1),
            self._random.getrandbits(32),
        )

    def _durations(self, kind: Kind, role: str) -> tuple[float, float]:
        match kind:
            case Kind.KILL | Kind.TERMINATE | Kind.EMPTY:
                return 0.0, 3.0  # until it comes back
            case Kind.FREEZE:
                return 0.5, LONGEST_S.get(role, 15.0)
            case Kind.BLACK_HOLE:
                return 0.5, 12.0
            case Kind.HOLD_PAGES:
                return 0.5, 5.0
            case Kind.DELAY | Kind.DUPLICATE | Kind.REORDER:
                return 2.0, 8.0
            case Kind.CUT:
                return 0.0, 0.0
