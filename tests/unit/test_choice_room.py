"""Decode scheduler: room for all choices of a request is found before the first one begins, and kept for the others."""

import pytest

from common.errors import DoesNotFit
from tests.support.scripted_decode import ScriptedDecode, choices, solo
from tests.support.sequences import sequence


class TestRoom:
    """n counts as n: seats and pages of all choices are there before the leader begins."""

    def test_a_leader_waits_for_the_pages_of_all_its_choices(self) -> None:
        worker = ScriptedDecode(5, 4)
        prompts = [[place, *range(5)] for place in range(2)]  # two pages, and one more for the other choice
        for place, name in enumerate("ab"):
            worker.add_choices(choices(name, prompts[place], arrival=place, max_tokens=2))
        worker.step()
        assert worker.output("a")
        assert not worker.output("b"), "two requests would wait for each other's pages"
        worker.run_until_idle()
        assert worker.scheduler.num_preemptions == 0
        assert [worker.outputs(name) for name in "ab"] == [
            [solo(prompt, 2, choice) for choice in range(2)] for prompt in prompts
        ]

    def test_what_is_promised_is_left_alone_by_younger_ones(self) -> None:
        worker = ScriptedDecode(4, 4, chunk_size=4, token_budget=8)
        worker.add_choices(choices("r", list(range(8)), max_tokens=1))
        worker.step()  # half of the prompt; two pages are the leader's, two are promised
        worker.add(sequence("young", [1], arrival=1, max_tokens=1))
        worker.step()
        assert not worker.output("young")
        worker.run_until_idle()
        assert worker.output("young") == solo([1], 1)

    def test_an_older_one_does_not_wait_for_what_is_promised(self) -> None:
        worker = ScriptedDecode(4, 4, chunk_size=4, token_budget=8)
        worker.add_choices(choices("r", list(range(8)), arrival=5))
        worker.step()
        old = worker.add(sequence("old", list(range(50, 56)), arrival=1, max_tokens=1))
        worker.step()
        assert old.block_ids
        worker.run_until_idle()
        assert worker.outputs("r") == [solo(list(range(8)), 5, choice) for choice in range(2)]

    def test_seats_of_followers_are_kept(self) -> None:
        worker = ScriptedDecode(max_sequences=3, chunk_size=4, token_budget=8)
        worker.add(sequence("before", [1], arrival=0, max_tokens=9))
        worker.add_choices(choices("r", list(range(20)), arrival=1))
        worker.step()
        young = worker.add(sequence("young", [2], arrival=2))
        worker.step()
        assert not young.block_ids
        assert (worker.scheduler.num_running, worker.scheduler.num_waiting) == (2, 2)
        worker.run_until_idle()
        assert worker.output("young") == solo([2], 5)

    def test_more_choices_than_seats_wait_until_all_have_one(self) -> None:
        worker = ScriptedDecode(max_sequences=3)
        worker.add(sequence("before", [1], arrival=0, max_tokens=3))
        leader, *_ = worker.add_choices(choices("r", [3, 4], 3, arrival=1))
        worker.step()
        assert not leader.block_ids
        worker.run_until_idle()
        assert worker.outputs("r", 3) == [solo([3, 4], 5, choice) for choice in range(3)]

    @pytest.mark.parametrize(("count", "fits"), [(3, True), (4, False)])
    def test_choices_that_can_never_fit_are_refused(self, count: int, fits: bool) -> None:
        worker = ScriptedDecode(4, 4)
        request = choices("r", list(range(6)), count, max_tokens=1)  # two pages, and one more for each choice
        if fits:
            worker.add_choices(request)
            return
        with pytest.raises(DoesNotFit) as refusal:
            worker.add_choices(request)
        assert (refusal.value.num_tokens, refusal.value.capacity) == (20, 16)

    @pytest.mark.parametrize("num_shown", [(0,) * 6, (12, 12, 11, 10, 12, 3), (33, 0, 20, 9, 1, 30)])
    def test_what_took_turns_before_a_failover_does_so_behind_it(self, num_shown: tuple[int, ...]) -> None:
        worker = ScriptedDecode(12, 4)
        prompt = [1, 2, 3, 4, 5]
        worker.add(sequence("before", [9], max_tokens=30))
        worker.add_choices(choices("r", prompt, 6, arrival=1, max_tokens=36, num_shown=num_shown))
        worker.add(sequence("behind", [9], arrival=2, max_tokens=30))
        worker.run_until_idle()
        wanted = [solo(prompt, 36, choice)[shown:] for choice, shown in enumerate(num_shown)]
        assert worker.outputs("r", 6) == wanted
        assert not [emission for emission in worker.told if emission.failure]
        assert worker.pool.num_free == worker.pool.num_total

    def test_a_choice_that_fits_in_no_pool_is_refused_whatever_the_others_need(self) -> None:
        worker = ScriptedDecode(4, 4)
        with pytest.raises(DoesNotFit) as refusal:
            worker.add_choices(choices("r", [1], 2, max_tokens=24, num_shown=(1, 16)))
        assert (refusal.value.num_tokens, refusal.value.capacity) == (17, 16)

    def test_those_that_run_alone_run_together(self) -> None:
        worker = ScriptedDecode()
        worker.add(sequence("before", [1], arrival=0, max_tokens=2))
        worker.add_choices(choices("alone", [3, 4], 3, arrival=1, max_tokens=3, runs_alone=True))
        worker.add(sequence("behind", [5], arrival=2, max_tokens=2))
        worker.run_until_idle()
        order = [emission.key.request for emission in worker.told]
        assert order == ["before"] * 2 + ["alone"] * 9 + ["behind"] * 2
        together = [emission.key.choice for emission in worker.told if emission.key.request == "alone"]
        assert together == [0, 0, 1, 2, 0, 1, 2, 1, 2]
