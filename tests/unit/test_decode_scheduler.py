"""Decode scheduler: reports from the field, order and limits."""

from typing import Any

import pytest

from common.errors import DoesNotFit, InvalidSetting
from common.messages.chain import chain_of
from common.scheduling.emission import FailureCode
from common.scheduling.plan import StepResult
from common.scheduling.sequence import FinishReason
from decode_worker.placing import Backlog
from decode_worker.ticket import Intake
from tests.support.scripted_decode import ScriptedDecode, solo
from tests.support.sequences import key, sequence


class TestCapacity:
    """B057: what can never fit is refused at once, what outgrows the pool ends with `length`."""

    def test_a_prompt_larger_than_the_pool_is_refused_and_blocks_nobody(self) -> None:
        worker = ScriptedDecode(10)
        with pytest.raises(DoesNotFit) as refusal:
            worker.add(sequence("large", range(200)))
        assert (refusal.value.num_tokens, refusal.value.capacity) == (201, 160)
        for number in range(5):
            worker.add(sequence(f"short{number}", [number] * 10, arrival=number))
        worker.run_until_idle()
        assert [worker.finish(f"short{number}") for number in range(5)] == [FinishReason.LENGTH] * 5

    @pytest.mark.parametrize(("num_tokens", "fits"), [(159, True), (160, False), (161, False)])
    def test_the_boundary(self, num_tokens: int, fits: bool) -> None:
        worker = ScriptedDecode(10)
        if not fits:
            with pytest.raises(DoesNotFit):
                worker.add(sequence("a", range(num_tokens)))
            return
        worker.add(sequence("a", range(num_tokens)))
        worker.run_until_idle()
        assert len(worker.output("a")) == 2

    def test_a_sequence_that_outgrows_the_pool_ends_with_length(self) -> None:
        worker = ScriptedDecode(10)
        worker.add(sequence("a", range(100), max_tokens=400))
        worker.run_until_idle()
        assert worker.finish("a") is FinishReason.LENGTH
        assert len(worker.output("a")) == 61
        assert worker.pool.num_free == 10

    def test_the_context_ends_a_sequence(self) -> None:
        worker = ScriptedDecode(max_context=20)
        worker.add(sequence("a", range(15), max_tokens=400))
        worker.run_until_idle()
        assert (worker.finish("a"), len(worker.output("a"))) == (FinishReason.LENGTH, 5)

    def test_a_resumed_sequence_may_fill_the_pool(self) -> None:
        """What an equal worker would have gone on with is not refused here."""
        worker = ScriptedDecode(10)
        worker.add(sequence("a", range(160), num_shown=60, max_tokens=400))
        worker.run_until_idle()
        assert (worker.finish("a"), len(worker.output("a"))) == (FinishReason.LENGTH, 1)

    def test_a_budget_below_the_number_of_seats_is_refused(self) -> None:
        with pytest.raises(InvalidSetting, match="token_budget"):
            ScriptedDecode(max_sequences=8, token_budget=7)


class TestAlone:
    """A sequence that runs alone: beside nobody, in its turn."""

    def test_it_waits_for_those_before_it_and_those_behind_it_wait(self) -> None:
        worker = ScriptedDecode()
        worker.add(sequence("before", [1, 2], arrival=0, max_tokens=3))
        worker.step()
        worker.add(sequence("alone", [3, 4], arrival=1, max_tokens=2, runs_alone=True))
        worker.add(sequence("behind", [5, 6], arrival=2, max_tokens=2))
        worker.run_until_idle()
        order = [emission.key.request for emission in worker.told]
        assert order == ["before"] * 3 + ["alone"] * 2 + ["behind"] * 2

    def test_it_overtakes_nobody(self) -> None:
        worker = ScriptedDecode(max_sequences=1)
        worker.add(sequence("running", [1, 2], arrival=0, max_tokens=2))
        worker.step()
        worker.add(sequence("alone", [3, 4], arrival=2, max_tokens=1, runs_alone=True))
        worker.add(sequence("older", [5, 6], arrival=1, max_tokens=1))
        worker.run_until_idle()
        assert [emission.key.request for emission in worker.told] == ["running", "running", "older", "alone"]

    def test_nobody_joins_it_while_its_prompt_is_computed(self) -> None:
        worker = ScriptedDecode(chunk_size=8, token_budget=8)
        lone = worker.add(sequence("alone", range(60), arrival=0, max_tokens=2, runs_alone=True))
        worker.step()
        newcomer = worker.add(sequence("newcomer", [1, 2], arrival=-1, max_tokens=2))  # older: it failed over
        while worker.scheduler.sequence(lone.key):
            assert worker.scheduler.is_exclusive
            assert not newcomer.block_ids
            worker.step()
        assert not worker.scheduler.is_exclusive
        worker.run_until_idle()
        assert worker.output("alone") == solo(list(range(60)), 2)


class TestPreemption:
    """B058, B061: nobody preempts itself, nobody is overtaken, and it ends."""

    def test_a_lone_prompt_that_just_fits_never_loses_its_work(self) -> None:
        worker = ScriptedDecode(10, chunk_size=16, token_budget=16)
        lone = worker.add(sequence("a", range(159), max_tokens=2))
        worker.run_until_idle()
        assert lone.num_preemptions == 0
        assert worker.num_steps == 11

    def test_two_large_prompts_run_one_after_the_other(self) -> None:
        worker = ScriptedDecode(10, chunk_size=16, token_budget=16)
        prompts = [worker.add(sequence(name, [*range(110), place], arrival=place)) for place, name in enumerate("ab")]
        worker.step()
        assert (worker.scheduler.num_running, worker.scheduler.num_waiting) == (1, 1)
        worker.run_until_idle()
        assert [prompt.num_preemptions for prompt in prompts] == [0, 0]
        assert [worker.output(name) for name in "ab"] == [solo([*range(110), place], 5) for place in range(2)]
        assert worker.num_steps < 20

    def _overfull(self, **settings: Any) -> ScriptedDecode:
        worker = ScriptedDecode(6, 2, **settings)
        for place, name in enumerate("abc"):
            worker.add(sequence(name, [place, place, place], arrival=place, max_tokens=8))
        return worker

    def test_the_youngest_goes_and_comes_back_with_the_same_tokens(self) -> None:
        worker = self._overfull()
        oldest, _, youngest = list(worker.live)
        while not youngest.num_preemptions:
            worker.step()
        assert youngest.block_ids == []
        assert youngest.num_computed == 0
        assert oldest.num_preemptions == 0
        worker.run_until_idle()
        assert [worker.output(name) for name in "abc"] == [solo([place] * 3, 8) for place in range(3)]
        assert worker.pool.num_free == 6

    def test_a_preempted_sequence_resumes_before_newcomers(self) -> None:
        worker = self._overfull()
        youngest = worker.live[-1]
        number = 10
        while not youngest.num_preemptions:
            worker.step()
        while not youngest.block_ids:
            newcomer = worker.add(sequence(f"n{number}", [number], arrival=number, max_tokens=2))
            number += 1
            worker.step()
            assert youngest.block_ids or not newcomer.block_ids
            assert number < 100
        worker.run_until_idle()
        assert worker.output("c") == solo([2] * 3, 8)

    def test_a_plan_names_nobody_who_was_preempted_for_it(self) -> None:
        worker = self._overfull()
        while not worker.live[-1].num_preemptions:
            plan = worker.step()
        assert key("c") not in [chunk.sequence.key for chunk in plan.chunks]

    def test_preemptions_are_bounded(self) -> None:
        worker = self._overfull(max_preemptions=0)
        worker.run_until_idle()
        failed = next(emission for emission in worker.told if emission.failure)
        assert (failed.key, failed.failure, failed.token_ids) == (key("c"), FailureCode.PREEMPTED, ())
        assert failed.index == len(worker.output("c"))
        assert worker.output("a") == solo([0] * 3, 8)
        assert worker.pool.num_free == 6

    def test_an_older_newcomer_preempts_too(self) -> None:
        """Age is the first arrival, also after a failover."""
        worker = ScriptedDecode(4, 2)
        young = worker.add(sequence("young", [1, 1, 1], arrival=9, max_tokens=5))
        worker.step()
        old = worker.add(sequence("old", [2, 2, 2], arrival=1, max_tokens=5))
        worker.run_until_idle()
        assert (old.num_preemptions, young.num_preemptions) == (0, 1)


class TestPrefix:
    @pytest.mark.parametrize("num_tokens", [16, 31, 32, 33])
    def test_a_wholly_cached_prompt_computes_its_last_token_in_a_block_of_its_own(self, num_tokens: int) -> None:
        """B063; the runner fails a write into a block of somebody else."""
        worker = ScriptedDecode()
        prompt = list(range(num_tokens))
        worker.add(sequence("first", prompt, max_tokens=30))
        worker.step()
        second = worker.add(sequence("second", prompt, arrival=1, max_tokens=30))
        worker.run_until_idle()
        assert second.num_preemptions == 0
        assert worker.output("first") == worker.output("second") == solo(prompt, 30)
        num_cached = (num_tokens - 1) // 16 * 16
        assert {emission.num_cached for emission in worker.told if emission.key == key("second")} == {num_cached}

    def test_generated_blocks_are_hit_by_the_next_turn(self) -> None:
        worker = ScriptedDecode()
        worker.add(sequence("first", range(10), max_tokens=30))
        worker.run_until_idle()
        turn = [*range(10), *worker.output("first"), 1]
        worker.add(sequence("second", turn, arrival=1))
        worker.run_until_idle()
        assert worker.told[-1].num_cached == 32
        assert worker.output("second") == solo(turn, 5)

    def test_tokens_found_after_a_preemption_are_not_reported_as_cached(self) -> None:
        worker = ScriptedDecode(6, 2)
        for place in range(3):
            worker.add(sequence(str(place), [place] * 3, arrival=place, max_tokens=8))
        worker.run_until_idle()
        assert any(sequence.num_preemptions for sequence in worker.live)
        assert {emission.num_cached for emission in worker.told} == {0}


class TestBatch:
    def test_decoding_comes_first_and_prompts_share_what_is_left(self) -> None:
        worker = ScriptedDecode(max_sequences=3, token_budget=20, chunk_size=15)
        worker.add(sequence("decoding", [1], arrival=0))
        worker.step()
        worker.add(sequence("long", range(40), arrival=1))
        worker.add(sequence("next", range(50, 90), arrival=2))
        plan = worker.step()
        assert [(chunk.sequence.key, chunk.length) for chunk in plan.chunks] == [
            (key("decoding"), 1),
            (key("long"), 9),
            (key("next"), 10),
        ]

    def test_a_short_prompt_does_not_wait_for_a_long_one(self) -> None:
        worker = ScriptedDecode(max_sequences=3, token_budget=20, chunk_size=20)
        worker.add(sequence("long", range(40), arrival=0))
        worker.add(sequence("short", range(50, 54), arrival=1))
        plan = worker.step()
        assert [(chunk.sequence.key, chunk.length, chunk.samples) for chunk in plan.chunks] == [
            (key("short"), 4, True),
            (key("long"), 16, False),
        ]

    def test_more_prompts_than_tokens_are_computed_in_turn(self) -> None:
        worker = ScriptedDecode(max_sequences=3, token_budget=3, chunk_size=3)
        for place, name in enumerate("abc"):
            worker.add(sequence(name, [place] * 6, arrival=place))
        worker.run_until_idle()
        assert [len(worker.output(name)) for name in "abc"] == [5, 5, 5]

    def test_prompts_get_what_the_running_ones_allow(self) -> None:
        asked: list[tuple[int, int, int]] = []

        def allowance(num_decoding: int, num_pairs: int, num_context: int) -> int:
            asked.append((num_decoding, num_pairs, num_context))
            return 6 if num_decoding else 15

        worker = ScriptedDecode(max_sequences=3, token_budget=20, chunk_size=20, prompt_allowance=allowance)
        worker.add(sequence("first", range(20), arrival=0, max_tokens=9))
        assert worker.step().num_tokens == 15
        worker.step()
        worker.add(sequence("second", range(30, 50), arrival=1))
        assert [chunk.length for chunk in worker.step().chunks] == [1, 6]
        assert asked == [(0, 0, 0), (0, 0, 15), (1, 21, 0)]

    def test_the_demand_counts_what_is_to_be_computed_here_and_elsewhere(self) -> None:
        worker = ScriptedDecode(max_sequences=3, token_budget=20, chunk_size=8)
        worker.add(sequence("decoding", range(5), arrival=0))
        worker.step()
        worker.add(sequence("here", range(10, 30), arrival=1))
        worker.add(sequence("there", range(30, 40), arrival=2), Intake.REMOTE)
        worker.step()
        worker.add(sequence("waits", range(40, 44), arrival=3))
        demand = worker.scheduler.demand
        assert (demand.num_decoding, demand.num_pairs) == (1, 7)
        assert (demand.here, demand.there) == (Backlog(2, 12 + 4), Backlog(1, 10))

    def test_seats_are_bounded_and_given_by_age(self) -> None:
        worker = ScriptedDecode(max_sequences=2)
        for name, arrival in (("b", 2), ("c", 3), ("a", 1)):
            worker.add(sequence(name, [arrival], arrival=arrival))
        worker.step()
        assert [bool(one.block_ids) for one in worker.live] == [True, False, True]

    def test_a_stop_id_wins_over_the_last_allowed_token(self) -> None:
        prompt = [1, 2, 3]
        outputs = solo(prompt, 3)
        worker = ScriptedDecode()
        stop = next(token for token in outputs if outputs.index(token) == 0)
        worker.add(sequence("a", prompt, max_tokens=1, stop_ids=(stop,)))
        worker.run_until_idle()
        assert (worker.finish("a"), worker.output("a")) == (FinishReason.STOP, [stop])

    def test_an_emission_carries_index_and_chain_of_what_was_shown(self) -> None:
        worker = ScriptedDecode()
        worker.add(sequence("a", [1, 2, 3, 7, 8], num_shown=2, max_tokens=4))
        worker.run_until_idle()
        assert [emission.index for emission in worker.told] == [2, 3]
        assert [emission.chain for emission in worker.told] == [
            chain_of([7, 8]),
            chain_of([7, 8, *worker.output("a")[:1]]),
        ]

    def test_nan_fails_one_row_alone(self) -> None:
        worker = ScriptedDecode()
        for place, name in enumerate("abc"):
            worker.add(sequence(name, [place] * 20, arrival=place))
        worker.step()
        worker.step("b")
        worker.run_until_idle()
        failures = [emission for emission in worker.told if emission.failure]
        assert [(one.key, one.failure, one.token_ids) for one in failures] == [
            (key("b"), FailureCode.INVALID_LOGITS, ())
        ]
        assert worker.output("b") == solo([1] * 20, 1)
        assert [worker.output(name) for name in "ac"] == [solo([0] * 20, 5), solo([2] * 20, 5)]
        again = worker.add(sequence("again", [1] * 20, arrival=9))
        worker.step()
        assert again.num_cached == 0

    def test_cancelling_in_flight_ignores_the_result(self) -> None:
        worker = ScriptedDecode()
        worker.add(sequence("a", [1, 2]))
        worker.scheduler.admit()
        plan = worker.scheduler.plan()
        assert worker.scheduler.cancel(key("a"))
        assert not worker.scheduler.cancel(key("a"))
        assert worker.scheduler.settle(plan, StepResult({key("a"): 3})) == []
        assert worker.pool.num_free == worker.pool.num_total
        assert worker.scheduler.sequence(key("a")) is None
