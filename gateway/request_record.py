"""The times and counts of one generation request, as its client experiences them.

TTFT runs from the request's arrival to the first generated token, shown or held back; a request that ends before its
first token has none. The n-th token of a choice after its first adds one inter-token latency; tokens that arrive
together share it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Self

from common.errors import RateLimited, RequestError
from common.telemetry.metrics import GatewayMetrics
from common.telemetry.traces import Stage
from gateway.engine import FinishReason, StageTimes
from gateway.schemas.usage import Timing

logger = logging.getLogger(__name__)

NOT_YET = -1.0
"""The time of a choice's last tokens before its first."""


class _Timed:
    """Notes how long its `with` block takes."""

    def __init__(self, stages_s: dict[Stage, float], stage: Stage, clock: Callable[[], float]) -> None:
        self._stages_s = stages_s
        self._stage = stage
        self._clock = clock

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        self._stages_s[self._stage] = self._clock() - self._began_s


class RequestRecord:
    """Observes one request from arrival until its `with` block is left, for the metrics and for one line in the log."""

    def __init__(self, metrics: GatewayMetrics, arrived_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._clock = clock
        self._stages_s: dict[Stage, float] = {}
        self._ttft_s: float | None = None
        self._reason: FinishReason | None = None
        self.model = ""
        self.num_prompt_tokens = 0
        self.num_tokens = 0

    def __enter__(self) -> Self:
        self._metrics.running.inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.running.dec()
        if kind is not None and issubclass(kind, RequestError | RateLimited):
            return
        outcome = self._outcome(kind)
        duration_s = self._clock() - self._arrived_s
        self._metrics.note_end(outcome)
        self._metrics.e2e.observe(duration_s)
        self._metrics.generation.inc(self.num_tokens)
        self._metrics.prompt.inc(self.num_prompt_tokens)
        logger.info(
            "request ended",
            extra={
                "model": self.model,
                "outcome": outcome,
                "num_prompt_tokens": self.num_prompt_tokens,
                "num_tokens": self.num_tokens,
                "duration_s": round(duration_s, 6),
            },
        )

    def tokens_arrived(self, num_tokens: int, last_s: float) -> float:
        """Note that so many tokens of a choice came just now, and return when that is. Its last ones came at `last_s`,
        `NOT_YET` if these are its first."""
        now = self._clock()
        if last_s == NOT_YET:
            self._first_token_arrived(now)
            num_latencies, latency_s = num_tokens - 1, 0.0
        else:
            num_latencies, latency_s = num_tokens, (now - last_s) / num_tokens
        if num_latencies:
            self._metrics.itl.observe(latency_s, num_latencies)
        self.num_tokens += num_tokens
        return now

    def timed(self, stage: Stage) -> "_Timed":
        """Note how long the block takes."""
        return _Timed(self._stages_s, stage, self._clock)

    def ended(self, reason: FinishReason) -> None:
        """Note that the answer is complete."""
        self._reason = reason

    def timing(self, times: StageTimes | None) -> Timing:
        """Return where the time went until now; `times` is what workers told of it."""
        return Timing(
            admission_s=self._stages_s.get(Stage.ADMIT, 0.0),
            tokenize_s=self._stages_s.get(Stage.TOKENIZE, 0.0),
            total_s=self._clock() - self._arrived_s,
            ttft_s=self._ttft_s,
            **({} if times is None else asdict(times)),
        )

    def _first_token_arrived(self, now: float) -> None:
        """The first token of a choice; the request's own is that of its first choice."""
        if self._ttft_s is None:
            self._ttft_s = now - self._arrived_s
            self._metrics.ttft.observe(self._ttft_s)

    def _outcome(self, kind: type[BaseException] | None) -> str:
        if kind is None and self._reason is not None:
            return self._reason
        is_abort = kind is not None and issubclass(kind, asyncio.CancelledError | ConnectionError)
        return "abort" if is_abort else "error"
