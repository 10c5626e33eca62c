"""What counters are fed with: prompt tokens of a step, preemptions of a scheduler, returns of Redis."""

import asyncio
from collections import deque

import pytest
from prometheus_client import CollectorRegistry

from common.errors import BrokerUnavailable
from common.messages.ids import GatewayId, ModelName
from common.rpc.channels import Channels
from common.scheduling.plan import Chunk, StepPlan
from common.telemetry.metrics import GatewayMetrics
from gateway import roster as roster_module
from gateway.dispatch import Dispatcher
from gateway.feeds import Feeds
from gateway.proofs import Proofs
from gateway.roster import ModelView, Roster
from tests.support.polling import until
from tests.support.scripted_decode import ScriptedDecode
from tests.support.sequences import sequence


def test_prompt_tokens_are_told_from_generated_ones() -> None:
    fresh = sequence("fresh", range(40))
    resumed = sequence("resumed", range(40), num_shown=10)
    plan = StepPlan((Chunk(fresh, 0, 16, samples=False), Chunk(resumed, 24, 16, samples=True)))
    assert (plan.num_tokens, plan.num_prompt_tokens) == (32, 16 + 6)
    assert StepPlan((Chunk(resumed, 39, 1, samples=True),)).num_prompt_tokens == 0


def test_preemptions_are_counted() -> None:
    worker = ScriptedDecode(4, 2)
    worker.add(sequence("young", [1, 1, 1], arrival=9, max_tokens=5))
    worker.step()
    worker.add(sequence("old", [2, 2, 2], arrival=1, max_tokens=5))
    assert worker.scheduler.num_preemptions == 0
    worker.run_until_idle()
    assert worker.scheduler.num_preemptions == 1


async def test_every_return_of_redis_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "REFRESH_S", 0.001)
    answers = deque([False, True, True, False, False, True])
    metrics = GatewayMetrics(CollectorRegistry())

    async def list_models() -> list[ModelName]:
        if answers and not answers.popleft():
            raise BrokerUnavailable("away")
        return []

    def open_model(model: ModelName) -> ModelView:
        raise AssertionError(model)

    channels = Channels("secret")
    feeds = Feeds(GatewayId("g"), channels, Dispatcher(GatewayId("g"), 3, metrics, Proofs(60.0)))
    roster = Roster(GatewayId("g"), feeds, list_models, open_model, metrics)
    watching = asyncio.create_task(roster.watch())
    try:
        await until(lambda: not answers)
        await until(lambda: metrics.registry.get_sample_value("tandem_broker_reconnects_total") == 2)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await channels.close()
