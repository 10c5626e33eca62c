"""Refusals that would only be repeated: while so much waits that another request of a tenant would come too late, the
like of it is refused here, at once.

Under overload most requests are refused. Asked one by one, Redis and the tokenisers would work for those more than for
whoever is served.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.errors import Overloaded
from common.messages.ids import ModelName, TenantId

LONGEST_S = 0.5
"""After so long one request asks again: others may have left meanwhile, or workers come."""

ASKING_S = 0.1
"""So long the others wait for what it is told."""

SHORTEST_RETRY_AFTER_S = 1.0
MAX_FLOWS = 4096


class Flow(NamedTuple):
    """Requests that wait behind one another."""

    model: ModelName
    tenant: TenantId
    priority: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    message: str
    retry_after_s: float
    limit_s: float
    began_s: float
    asks_s: float
    """From then on one request asks again."""
    forgotten_s: float


class Brake:
    """Of one gateway. Limits are the seconds that a request has, None: without end. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: dict[Flow, _Refusal] = {}

    def check(self, flow: Flow, limit_s: float | None) -> None:
        """Raise `Overloaded` if a request like this one was refused just now."""
        refusal = self._refusals.get(flow)
        if refusal is None:
            return
        now_s = self._clock()
        if now_s >= refusal.forgotten_s:
            del self._refusals[flow]
        elif _endless(limit_s) <= refusal.limit_s:
            if now_s >= refusal.asks_s:  # this one asks; those behind it wait for what it is told
                self._refusals[flow] = replace(refusal, asks_s=refusal.forgotten_s)
                return
            retry_after_s = refusal.retry_after_s - (now_s - refusal.began_s)
            raise Overloaded(refusal.message, retry_after_s=max(retry_after_s, SHORTEST_RETRY_AFTER_S))

    def note(self, flow: Flow, limit_s: float | None, error: Overloaded) -> None:
        """A request was refused."""
        if error.lasts_s <= 0:
            return
        if len(self._refusals) >= MAX_FLOWS:
            self._refusals.clear()
        now_s = self._clock()
        asks_s = now_s + min(error.lasts_s, LONGEST_S)
        # Not the error itself: by its traceback it holds the whole request.
        self._refusals[flow] = _Refusal(
            error.message, error.retry_after_s, _endless(limit_s), now_s, asks_s, asks_s + ASKING_S
        )


def _endless(limit_s: float | None) -> float:
    return math.inf if limit_s is None else limit_s
