"""How long to wait before a dead process is started again."""

FIRST_S = 0.1
LONGEST_S = 10.0
HEALTHY_S = 30.0
"""A process that lived this long has recovered: its next death is a first one again."""


class Backoff:
    """Delays of one seat: doubling from `FIRST_S` to `LONGEST_S`, back to the first after a healthy life."""

    def __init__(self) -> None:
        self._num_deaths = 0

    @property
    def num_deaths(self) -> int:
        """How many deaths in a row, without a healthy life between them."""
        return self._num_deaths

    def delay_after(self, lived_s: float) -> float:
        """Return how long to wait now that the process died after `lived_s` seconds."""
        self._num_deaths = 1 if lived_s >= HEALTHY_S else self._num_deaths + 1
        return float(min(LONGEST_S, FIRST_S * 2 ** (min(self._num_deaths, 16) - 1)))
