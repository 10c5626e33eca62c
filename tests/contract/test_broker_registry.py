"""What every broker promises about workers, models and their cards."""

from common.broker.protocols import Waiting
from common.messages.ids import Epoch, ModelName
from common.messages.registry import WorkerHealth
from tests.support.broker_calls import place, read
from tests.support.broker_harness import BRIEF, Broker, Harness
from tests.support.broker_records import D0, MODEL, make_card, worker_load, worker_record


class TestRegistry:
    async def test_a_beat_registers(self, broker: Broker) -> None:
        record, load = worker_record(), worker_load(5, num_running=2)
        await broker.registry.beat(record, load)
        [state] = await broker.registry.workers()
        assert (state.record, state.load) == (record, load)
        assert 0 <= state.age_s < 20

    async def test_a_silent_worker_is_not_listed(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        await broker.registry.beat(worker_record(), worker_load())
        await harness.elapse(0.55)
        assert await broker.registry.workers() == []
        await broker.registry.beat(worker_record(), worker_load())
        assert len(await broker.registry.workers()) == 1

    async def test_the_age_grows_until_the_next_beat(self, harness: Harness) -> None:
        broker = harness.broker()
        await broker.registry.beat(worker_record(), worker_load())
        await harness.elapse(0.1)
        [state] = await broker.registry.workers()
        assert state.age_s >= 0.1

    async def test_leaving_is_for_the_own_epoch_only(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(epoch=2), worker_load())
        await broker.registry.leave(D0, Epoch(1))
        assert len(await broker.registry.workers()) == 1
        await broker.registry.leave(D0, Epoch(2))
        assert await broker.registry.workers() == []

    async def test_a_restarted_worker_takes_its_seat_and_keeps_it(self, broker: Broker) -> None:
        for epoch in (1, 2, 1):  # the first process was frozen and goes on beating
            await broker.registry.beat(worker_record(epoch=epoch), worker_load())
        [state] = await broker.registry.workers()
        assert state.record.epoch == 2

    async def test_a_loading_worker_is_visible_but_gets_no_job(self, broker: Broker) -> None:
        await broker.registry.beat(worker_record(), worker_load(health=WorkerHealth.LOADING))
        assert len(await broker.registry.workers()) == 1
        assert await place(broker, "a") == Waiting(0)
        await broker.registry.beat(worker_record(), worker_load())
        assert await read(broker) == ["a"]

    async def test_models_do_not_see_each_other(self, harness: Harness) -> None:
        one, other = harness.broker(ModelName("m")), harness.broker(ModelName("m}:workers"))
        await one.registry.beat(worker_record(), worker_load())
        assert await other.registry.workers() == []
        assert await other.index.models() == ["m"]

    async def test_the_index_knows_models_that_beat_lately(self, harness: Harness) -> None:
        broker = harness.broker(policy=BRIEF)
        assert await broker.index.models() == []
        await broker.registry.beat(worker_record(), worker_load(health=WorkerHealth.LOADING))
        assert await broker.index.models() == [MODEL]
        await harness.elapse(0.55)
        assert await broker.index.models() == []

    async def test_the_card_is_the_last_one_published(self, broker: Broker) -> None:
        assert await broker.registry.card() is None
        await broker.registry.publish_card(make_card(created=1))
        await broker.registry.publish_card(make_card(created=2))
        assert await broker.registry.card() == make_card(created=2)
