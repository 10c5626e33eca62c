"""What a request has cost so far, and when that is too much."""

from common.errors import WorkerLost
from common.messages.job import SUSPECT_DEATHS


class FailureBudget:
    """Failures of one request over its placements and tries. `max_failures`: the one of that number ends it."""

    def __init__(self, max_failures: int) -> None:
        self._max_failures = max_failures
        self.num_failures = 0
        self.num_deaths = 0
        """Workers of both roles that died or stalled over the request."""
        self._num_unaccepted_deaths = 0

    @property
    def is_suspect(self) -> bool:
        """Whether workers died over this request so often that it must run alone."""
        return self.num_deaths >= SUSPECT_DEATHS

    def fail(self, reason: str, *, is_death: bool) -> WorkerLost | None:
        """Use up one failure; return the request's end if it was the last one."""
        self.num_failures += 1
        self.num_deaths += is_death
        if self.num_failures >= self._max_failures:
            return WorkerLost(f"the request failed {self.num_failures} times, last because {reason}")
        return None

    def fail_unaccepted(self, reason: str) -> WorkerLost | None:
        """A worker died that may have had the request without having said so; return the request's end if it has to.

        It has most likely stood unread in a queue while another request ended that worker: its budget stays as it is,
        and a whole queue of suspects would have to take turns. Still it may be the cause, so many of these end it, too.
        """
        self._num_unaccepted_deaths += 1
        if self._num_unaccepted_deaths >= self._max_failures:
            return WorkerLost(f"{self._num_unaccepted_deaths} workers were lost over the request, last: {reason}")
        return None
