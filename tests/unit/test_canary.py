"""Canaries over an engine that does what the test says, under the test's clock."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from common.errors import BrokerUnavailable, DeadlineExceeded, InvalidLogits, Overloaded
from common.messages.ids import ChoiceIndex, Epoch, Fingerprint, ModelName, RequestId, WorkerId
from common.messages.registry import ModelCard
from common.telemetry.metrics import GatewayMetrics
from gateway import canary
from gateway.canary import FIRST_PAUSE_S, STILL_S, Canary, proof_window_s, time_limit_s
from gateway.canary_targets import CanaryTarget
from gateway.engine import EndOfChoice, FinishReason, GenerateEvent, GenerateRequest, Readiness, TokenDelta
from gateway.proofs import Proofs
from gateway.streams import Source
from tests.support.polling import turns

INTERVAL_S = 10.0
LIMIT_S = time_limit_s(INTERVAL_S)
TARGET = CanaryTarget(
    source=Source(WorkerId("decode-0"), Epoch(1)),
    model=ModelName("m"),
    fingerprint=Fingerprint("f"),
    is_serving=True,
    num_prompt_tokens=33,
    num_ids=100,
    num_queued=0,
    num_steps=5,
    num_prefill_steps=7,
)
Script = list[GenerateEvent | Exception | float]
"""What an engine does: events, errors, seconds that pass."""

RETURNED: Script = [
    TokenDelta(0, (1,)),
    TokenDelta(1, (2,)),
    EndOfChoice(FinishReason.LENGTH, 2),
]


@dataclass
class FakeEngine:
    """Plays one script per worker, over and over."""

    clock: "Time"
    scripts: dict[str, Script] = field(default_factory=dict)
    requests: list[GenerateRequest] = field(default_factory=list)
    pause_s: float = 0.0
    """So late is the end of a request's time."""

    async def models(self) -> Sequence[ModelCard]:
        return []

    def readiness(self) -> Readiness:
        return Readiness(is_ready=True)

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        raise AssertionError("a canary has no stop strings")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        self.requests.append(request)
        for item in self.scripts[str(request.worker)]:
            if isinstance(item, float):
                self.clock.now_s += item
                continue
            if isinstance(item, DeadlineExceeded):
                assert request.deadline_s is not None
                self.clock.now_s += request.deadline_s + self.pause_s
            if isinstance(item, Exception):
                raise item
            yield item


class Time:
    """Seconds that pass when the test or a sleeper says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        await asyncio.sleep(0)


class CanaryHarness:
    """A canary with all that it touches."""

    def __init__(self) -> None:
        self.time = Time()
        self.engine = FakeEngine(self.time)
        self.targets = [TARGET]
        self.proofs = Proofs(proof_window_s(INTERVAL_S), self.time)
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.canary = Canary(
            self.engine,
            lambda: self.targets,
            self.proofs,
            self.metrics,
            INTERVAL_S,
            clock=self.time,
            sleep=self.time.sleep,
            random=Random(1),
        )

    async def look(self) -> int:
        """Let the canary look once and its rounds end; return how many requests that took."""
        num_before = len(self.engine.requests)
        self.canary.look()
        await turns(200)
        return len(self.engine.requests) - num_before

    @property
    def is_ready(self) -> bool:
        """Readiness as the gateway asks for it."""
        return self.proofs.readiness([target.source for target in self.targets if target.is_serving]).is_ready

    def sample(self, name: str) -> float:
        """Return a metric."""
        return self.metrics.registry.get_sample_value(name) or 0.0


@pytest.fixture
def harness() -> CanaryHarness:
    made = CanaryHarness()
    made.engine.scripts["decode-0"] = RETURNED
    return made


async def test_a_new_worker_is_tried_at_once_and_then_once_per_interval(harness: CanaryHarness) -> None:
    assert not harness.is_ready
    assert await harness.look() == 1
    assert harness.is_ready
    assert harness.sample("tandem_canary_seconds_count") == 1
    harness.time.now_s += INTERVAL_S - 0.1
    assert await harness.look() == 0
    harness.time.now_s += 0.1
    assert await harness.look() == 1


async def test_a_canary_is_random_greedy_bound_to_its_worker_and_in_no_trace(harness: CanaryHarness) -> None:
    await harness.look()
    harness.time.now_s += INTERVAL_S
    await harness.look()
    first, second = harness.engine.requests
    assert first.prompt_ids != second.prompt_ids
    assert first.request != second.request
    assert len(first.prompt_ids) == TARGET.num_prompt_tokens
    assert set(first.prompt_ids) <= set(range(TARGET.num_ids))
    assert (first.worker, first.fingerprint, first.deadline_s) == ("decode-0", "f", LIMIT_S)
    sampling = first.sampling
    assert (sampling.is_greedy, sampling.max_tokens, sampling.min_tokens, sampling.stop_ids) == (True, 2, 2, ())
    assert first.traceparent.endswith("-00")


async def test_a_real_answer_spares_the_canary(harness: CanaryHarness) -> None:
    await harness.look()
    harness.time.now_s += INTERVAL_S - 1
    harness.proofs.note(TARGET.source)
    harness.time.now_s += INTERVAL_S - 1
    assert await harness.look() == 0


async def test_b110_an_engine_that_hangs_is_doubted_until_a_canary_comes_back(harness: CanaryHarness) -> None:
    await harness.look()
    harness.engine.scripts["decode-0"] = [DeadlineExceeded("over")]
    harness.time.now_s += INTERVAL_S
    assert await harness.look() == 1
    assert not harness.is_ready
    assert not harness.proofs.is_trusted(TARGET.source)
    assert harness.sample("tandem_canary_failures_total") == 1
    assert await harness.look() == 0
    harness.engine.scripts["decode-0"] = RETURNED
    harness.time.now_s += FIRST_PAUSE_S
    assert await harness.look() == 1
    assert harness.is_ready
    assert harness.proofs.is_trusted(TARGET.source)


async def test_half_a_canary_tells_how_far_it_came(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [TokenDelta(0, (1,)), DeadlineExceeded("over")]
    await harness.look()
    reason = harness.proofs.readiness([TARGET.source]).reason
    assert (
        reason
        == f"no canary has come back for {LIMIT_S:.0f} s: decode-0 (1 of 2 tokens came back within {LIMIT_S:.0f} s)"
    )


@pytest.mark.parametrize(
    ("moved", "script"),
    [
        (replace(TARGET, num_steps=6), [DeadlineExceeded("over")]),
        (replace(TARGET, num_steps=6), [TokenDelta(0, (1,)), DeadlineExceeded("over")]),
        (replace(TARGET, num_steps=6), [Overloaded("no room")]),
        (replace(TARGET, num_prefill_steps=8, num_queued=1), [DeadlineExceeded("over")]),
    ],
    ids=["decodes", "decodes behind the first token", "full", "prefills"],
)
async def test_b112_work_on_other_requests_is_an_excuse(
    harness: CanaryHarness, moved: CanaryTarget, script: Script
) -> None:
    await harness.look()
    harness.time.now_s += INTERVAL_S
    harness.engine.scripts["decode-0"] = script
    harness.canary.look()
    harness.targets = [moved]
    await turns(200)
    harness.time.now_s += INTERVAL_S
    assert harness.is_ready
    assert harness.proofs.is_trusted(TARGET.source)
    assert harness.sample("tandem_canary_failures_total") == 0


@pytest.mark.parametrize(
    ("num_queued", "script"),
    [(1, [TokenDelta(0, (1,)), DeadlineExceeded("over")]), (0, [DeadlineExceeded("over")])],
    ids=["decoding hangs", "its engine has not even queued it"],
)
async def test_prefills_for_others_are_no_excuse(harness: CanaryHarness, num_queued: int, script: Script) -> None:
    harness.engine.scripts["decode-0"] = script
    harness.canary.look()
    harness.targets = [replace(TARGET, num_prefill_steps=8, num_queued=num_queued)]
    await turns(200)
    assert not harness.proofs.is_trusted(TARGET.source)


async def test_a_first_token_that_came_late_gives_the_second_one_time(harness: CanaryHarness) -> None:
    late = LIMIT_S - STILL_S + 1
    harness.engine.scripts["decode-0"] = [late, TokenDelta(0, (1,)), LIMIT_S - late, DeadlineExceeded("over")]
    harness.engine.pause_s = -LIMIT_S  # the time of this script is in itself
    await harness.look()
    assert harness.proofs.is_trusted(TARGET.source)
    assert harness.is_ready


async def test_a_slow_step_is_doubted_until_it_ends(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [DeadlineExceeded("over")]
    await harness.look()
    assert not harness.is_ready
    harness.time.now_s += FIRST_PAUSE_S
    harness.canary.look()
    harness.targets = [replace(TARGET, num_steps=6)]
    await turns(200)
    assert harness.is_ready
    assert harness.proofs.is_trusted(TARGET.source)


async def test_a_full_worker_that_does_nothing_is_doubted(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [Overloaded("no room")]
    assert await harness.look() > 1
    assert not harness.proofs.is_trusted(TARGET.source)


async def test_what_came_before_it_was_given_back_counts_no_more(
    harness: CanaryHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "STILL_S", 1.0)
    harness.engine.scripts["decode-0"] = [TokenDelta(0, (1,)), LIMIT_S / 2, Overloaded("another one runs alone")]
    assert await harness.look() == 2
    assert "1 of 2 tokens came back" in harness.proofs.readiness([TARGET.source]).reason


async def test_a_failure_is_no_excuse_however_busy(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [InvalidLogits("the model computed NaN")]
    harness.canary.look()
    harness.targets = [replace(TARGET, num_steps=6)]
    await turns(200)
    reason = harness.proofs.readiness([TARGET.source]).reason
    assert "its canary failed: the model computed NaN" in reason


async def test_a_redis_that_is_away_says_nothing_about_the_worker(harness: CanaryHarness) -> None:
    await harness.look()
    harness.time.now_s += INTERVAL_S
    harness.engine.scripts["decode-0"] = [BrokerUnavailable("away")]
    assert await harness.look() == 1
    assert harness.is_ready
    assert harness.sample("tandem_canary_failures_total") == 0


async def test_pauses_grow_up_to_the_interval(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [InvalidLogits("NaN")]
    await harness.look()
    for pause_s in (1, 2, 4, 8, 10, 10):
        harness.time.now_s += pause_s - 0.1
        assert await harness.look() == 0
        harness.time.now_s += 0.1
        assert await harness.look() == 1


async def test_a_worker_that_was_away_proves_itself_again_at_once(harness: CanaryHarness) -> None:
    await harness.look()
    harness.targets = [replace(TARGET, is_serving=False)]
    assert await harness.look() == 0
    harness.targets = [TARGET]
    assert not harness.is_ready
    assert await harness.look() == 1
    assert harness.is_ready


async def test_a_pause_of_the_gateway_is_no_failure_of_a_worker(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [DeadlineExceeded("over")]
    harness.engine.pause_s = 2.0
    assert await harness.look() == 1
    assert harness.proofs.is_trusted(TARGET.source)
    harness.engine.pause_s = 0.0
    harness.time.now_s += FIRST_PAUSE_S
    assert await harness.look() == 1
    assert not harness.proofs.is_trusted(TARGET.source)


async def test_the_end_of_a_worker_is_no_failure_of_its_canary(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [DeadlineExceeded("over")]
    harness.canary.look()
    harness.targets = []
    await turns(200)
    assert harness.sample("tandem_canary_failures_total") == 0


async def test_one_bad_worker_of_two_is_left_out_and_the_gateway_stays_ready(harness: CanaryHarness) -> None:
    other = replace(TARGET, source=Source(WorkerId("decode-1"), Epoch(2)))
    harness.targets = [TARGET, other]
    harness.engine.scripts |= {"decode-1": [DeadlineExceeded("over")]}
    assert await harness.look() == 2
    assert harness.is_ready
    assert [harness.proofs.is_trusted(target.source) for target in harness.targets] == [True, False]


async def test_a_mistake_of_ours_is_logged_and_stops_nothing(
    harness: CanaryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.engine.scripts.clear()
    assert await harness.look() == 1
    assert "mistake of ours" in caplog.text
    harness.engine.scripts["decode-0"] = RETURNED
    harness.time.now_s += FIRST_PAUSE_S
    assert await harness.look() == 1
    assert harness.is_ready


async def test_closing_gives_up_rounds_under_way(harness: CanaryHarness) -> None:
    harness.engine.scripts["decode-0"] = [Overloaded("no room")]
    watching = asyncio.create_task(harness.canary.watch())
    await turns()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    num_sent = len(harness.engine.requests)
    await turns(50)
    assert len(harness.engine.requests) == num_sent
