"""Two tokens through place, prefill, transfer and decode, for every decode worker that has proved nothing lately.

Life of a round: a worker serves and its last proof is older than the interval (or it has none) -> a request that only
this worker may decode -> its tokens came back (proof), or its time is over, or it failed.

Whose time is over is doubted only if nothing moves: as long as the worker's engine finishes steps, or, while prompts
wait for their prefill there, any prefill worker of its version does, the canary stands in a queue of real work and the
worker is busy. Long prefills alone make no gateway unready, an engine that hangs does. The same holds where no room is
found.

What it costs: an answer to a client proves as much, so that a worker with traffic sees none. An idle one computes two
blocks and a token of prompt and two tokens of answer per interval and gateway (35 tokens in 10 s with blocks of 16),
and keeps the two blocks in its prefix cache until they are the oldest. The prompt is random, so that no cache shortens
the way. Canaries are in no client's metric and in no trace; workers count them as the work that they are.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from common.errors import DeadlineExceeded, Overloaded, TandemError, Unavailable
from common.messages.sampling import SamplingParams
from common.telemetry.metrics import GatewayMetrics
from gateway.canary_targets import NUM_TOKENS, CanaryTarget
from gateway.engine import Engine, GenerateRequest, TokenDelta
from gateway.proofs import Proofs
from gateway.request_ids import new_request_id
from gateway.streams import Source

logger = logging.getLogger(__name__)

LOOK_S = 0.25
SHORTEST_LIMIT_S = 15.0
"""A worker needs 10 s (--stall-s) to find that its engine stalls; steps that take less are slow, but they are work."""

LONGEST_LIMIT_S = 30.0
STILL_S = 10.0
"""So long must a canary's second token be overdue: where the first one has stood in a queue, its time begins then."""

ROOM_RETRY_S = 0.5
FIRST_PAUSE_S = 1.0

PAUSED_S = 1.0
"""A round that ends so long after its time has met a pause of this very process, and tells nothing about the worker."""

MARGIN_S = 2.0
"""How late a due canary may begin and its verdict come: looks are rare, and the event loop may be busy."""


def time_limit_s(interval_s: float) -> float:
    """Return how long a canary may take."""
    return min(max(interval_s, SHORTEST_LIMIT_S), LONGEST_LIMIT_S)


def proof_window_s(interval_s: float) -> float:
    """Return how long a proof counts: until the next canary is due, and as long as that one may take."""
    return interval_s + time_limit_s(interval_s) + MARGIN_S


@dataclass(slots=True)
class _Round:
    """One worker's canary, from the first attempt to the verdict. `start` is the worker as it was then; `num_tokens`
    came of the last attempt, `answered_at` is when the last tokens came."""

    start: CanaryTarget
    ends_at: float
    num_tokens: int = 0
    answered_at: float = float("-inf")


@dataclass(slots=True)
class _Pause:
    """After `num_misses` rounds in a row that came to nothing, the next one begins no earlier than at `until`."""

    num_misses: int = 0
    until: float = field(default=float("-inf"))


class Canary:
    """Sends canaries through `engine` and tells `proofs` what became of them. Use it on one event loop."""

    def __init__(
        self,
        engine: Engine,
        targets: Callable[[], Collection[CanaryTarget]],
        proofs: Proofs,
        metrics: GatewayMetrics,
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        random: Random | None = None,
    ) -> None:
        self._engine = engine
        self._targets = targets
        self._proofs = proofs
        self._metrics = metrics
        self._interval_s = interval_s
        self._limit_s = time_limit_s(interval_s)
        self._clock = clock
        self._sleep = sleep
        self._random = random or Random()
        self._rounds: dict[Source, asyncio.Task[None]] = {}
        self._pauses: dict[Source, _Pause] = {}

    async def watch(self) -> None:
        """Send what is due until cancelled."""
        try:
            while True:
                self.look()
                await self._sleep(LOOK_S)
        finally:
            await self.close()

    def look(self) -> None:
        """Begin a round for every worker that owes a proof."""
        targets = self._targets()
        listed = {target.source for target in targets}
        self._proofs.retain(listed)
        for source in self._pauses.keys() - listed:
            del self._pauses[source]
        for target in targets:
            if not target.is_serving:
                self._proofs.lapse(target.source)
                self._pauses.pop(target.source, None)
            elif self._is_due(target.source):
                self._rounds[target.source] = asyncio.create_task(
                    self._run(target), name=f"canary-{target.source.worker}"
                )

    async def close(self) -> None:
        """Give up the rounds under way."""
        rounds = list(self._rounds.values())
        for task in rounds:
            task.cancel()
        await asyncio.gather(*rounds, return_exceptions=True)

    def _is_due(self, source: Source) -> bool:
        if source in self._rounds or self._clock() < self._pause(source).until:
            return False
        age_s = self._proofs.age_s(source)
        return age_s is None or age_s >= self._interval_s or not self._proofs.is_trusted(source)

    def _pause(self, source: Source) -> _Pause:
        return self._pauses.get(source) or _Pause()

    async def _run(self, start: CanaryTarget) -> None:
        """Run a round to its verdict."""
        began_at = self._clock()
        flown = _Round(start, began_at + self._limit_s)
        try:
            await self._fly(flown)
        except DeadlineExceeded:
            self._settle_late(flown)
        except Unavailable as error:
            self._rest(start.source)  # Redis is away: this says nothing about the worker
            logger.info("no canary for %s: %s", start.source.worker, error)
        except TandemError as error:
            self._condemn(start.source, self._proofs.fail, f"its canary failed: {error}")
        except Exception:
            logger.exception("canary for %s ended by a mistake of ours", start.source.worker)
            self._condemn(start.source, self._proofs.fail, "its canary could not be sent")
        else:
            self._metrics.canary_duration.observe(self._clock() - began_at)
            self._proofs.note(start.source)
            self._pauses.pop(start.source, None)
        finally:
            del self._rounds[start.source]

    async def _fly(self, flown: _Round) -> None:
        """Return when all tokens came back; raise `DeadlineExceeded` if they, or room for them, took too long."""
        while (left_s := flown.ends_at - self._clock()) > 0:
            try:
                await self._receive(flown, self._request(flown.start, left_s))
            except Overloaded:
                await self._sleep(ROOM_RETRY_S)
            else:
                return
        raise DeadlineExceeded("no room for a canary")

    async def _receive(self, flown: _Round, request: GenerateRequest) -> None:
        flown.num_tokens = 0  # an attempt before may have been given back half done
        async with aclosing(self._engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    flown.num_tokens += len(event.token_ids)
                    flown.answered_at = self._clock()

    def _request(self, target: CanaryTarget, left_s: float) -> GenerateRequest:
        return GenerateRequest(
            request=new_request_id(),
            model=target.model,
            prompt_ids=self._random.choices(range(target.num_ids), k=target.num_prompt_tokens),
            sampling=SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, min_tokens=NUM_TOKENS),
            traceparent=f"00-{self._random.getrandbits(127) + 1:032x}-{self._random.getrandbits(63) + 1:016x}-00",
            fingerprint=target.fingerprint,
            deadline_s=left_s,
            worker=target.source.worker,
        )

    def _settle_late(self, flown: _Round) -> None:
        start = flown.start
        if self._clock() - flown.ends_at > PAUSED_S:
            self._rest(start.source)
            return
        now = next((target for target in self._targets() if target.source == start.source), start)
        has_decoded = now.num_steps > start.num_steps
        is_queued = flown.num_tokens == 0 and now.num_queued > 0
        has_prefilled = is_queued and now.num_prefill_steps > start.num_prefill_steps
        has_answered = self._clock() - flown.answered_at < STILL_S
        if has_decoded or has_prefilled or has_answered:
            self._proofs.excuse(start.source)
        else:
            came = "nothing" if flown.num_tokens == 0 else f"{flown.num_tokens} of {NUM_TOKENS} tokens"
            self._condemn(start.source, self._proofs.miss, f"{came} came back within {self._limit_s:.0f} s")

    def _condemn(self, source: Source, condemn: Callable[[Source, str], None], reason: str) -> None:
        """Doubt a worker, unless it has left or was lost meanwhile."""
        self._rest(source)
        if any(target.source == source and target.is_serving for target in self._targets()):
            self._metrics.canary_failures.inc()
            condemn(source, reason)

    def _rest(self, source: Source) -> None:
        """Wait before the next round, longer after every one in a row that came to nothing."""
        pause = self._pauses.setdefault(source, _Pause())
        pause.until = self._clock() + min(self._interval_s, FIRST_PAUSE_S * 2**pause.num_misses)
        pause.num_misses += 1
