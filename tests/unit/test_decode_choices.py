"""Decode scheduler: several choices of one request share its prompt, and each goes its own way."""

import pytest

from common.scheduling.emission import FailureCode
from common.scheduling.plan import BlockCopy
from common.scheduling.sequence import FinishReason, Sequence
from decode_worker.first_token import FirstToken
from decode_worker.ticket import Intake
from tests.support.likelihoods import likelihood
from tests.support.scripted_decode import ScriptedDecode, choices, solo
from tests.support.scripted_runner import next_token
from tests.support.sequences import key, sequence

BLOCK_SIZE = 16


def num_computed(worker: ScriptedDecode) -> dict[str, int]:
    """Run to the end; return how many tokens were computed for each request."""
    computed: dict[str, int] = {}
    while worker.scheduler.num_running + worker.scheduler.num_waiting:
        for chunk in worker.step().chunks:
            request = chunk.sequence.key.request
            computed[request] = computed.get(request, 0) + chunk.length
        assert worker.num_steps < 1000, "does not end"
    return computed


class TestPrompt:
    """The prompt is computed once. B063 with n = 2: whatever its length, and however much of it is cached."""

    @pytest.mark.parametrize("is_cached", [False, True])
    @pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33])
    def test_b063_every_choice_is_that_of_a_request_of_its_own(self, num_tokens: int, is_cached: bool) -> None:
        worker = ScriptedDecode()
        prompt = list(range(num_tokens))
        if is_cached:
            worker.add(sequence("first", prompt, max_tokens=30))
            worker.run_until_idle()
        worker.add_choices(choices("r", prompt, 3, max_tokens=30))
        computed = num_computed(worker)
        assert worker.outputs("r", 3) == [solo(prompt, 30, choice) for choice in range(3)]
        num_cached = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE if is_cached else 0
        assert computed["r"] == num_tokens - num_cached + 2 + 3 * 29
        assert {emission.num_cached for emission in worker.told if emission.key.request == "r"} == {num_cached}
        assert worker.pool.num_free == worker.pool.num_total
        assert worker.scheduler.violations() == []

    def test_full_blocks_are_shared_and_the_last_one_is_copied(self) -> None:
        worker = ScriptedDecode()
        leader, follower = worker.add_choices(choices("r", list(range(40))))
        worker.step()
        worker.step()
        assert follower.block_ids == []
        plan = worker.step()
        assert follower.block_ids[:2] == leader.block_ids[:2]
        assert follower.block_ids[2] != leader.block_ids[2]
        assert plan.copies == (BlockCopy(leader.block_ids[2], follower.block_ids[2]),)
        assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(40, 1), (39, 1)]

    def test_a_last_token_in_a_block_of_its_own_needs_no_copy(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", list(range(33))))
        assert [worker.step().copies for _ in range(4)] == [()] * 4
        assert len(worker.output("r", 1)) == 2

    def test_a_leader_that_is_over_leaves_its_full_blocks(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", list(range(40)), 3, max_tokens=1))
        assert num_computed(worker) == {"r": 40 + 2 * 8}
        assert worker.outputs("r", 3) == [solo(list(range(40)), 1, choice) for choice in range(3)]

    def test_a_failover_goes_on_where_each_choice_was(self) -> None:
        worker = ScriptedDecode()
        prompt = list(range(20))
        worker.add_choices(choices("r", prompt, 3, max_tokens=8, num_shown=(2, 0, 5)))
        assert num_computed(worker)["r"] == (20 + 2) + 1 + 5 + (5 + 7 + 2)
        wanted = [solo(prompt, 8, choice)[shown:] for choice, shown in enumerate((2, 0, 5))]
        assert worker.outputs("r", 3) == wanted


class TestEnds:
    """A choice ends alone; a failure and a cancel of the placement end them all."""

    def test_a_choice_is_cancelled_alone(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", list(range(20)), 3))
        for _ in range(3):
            worker.step()
        assert worker.scheduler.cancel(key("r", 1))
        assert not worker.scheduler.cancel(key("r", 1))
        worker.run_until_idle()
        assert [len(output) for output in worker.outputs("r", 3)] == [5, 2, 5]

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
    def test_the_next_one_leads_when_the_leader_is_cancelled(self, num_steps: int) -> None:
        worker = ScriptedDecode(chunk_size=8)
        prompt = list(range(20))
        worker.add_choices(choices("r", prompt, 3))
        for _ in range(num_steps):
            worker.step()
        assert worker.scheduler.cancel(key("r"))
        worker.run_until_idle()
        assert worker.outputs("r", 3)[1:] == [solo(prompt, 5, choice) for choice in (1, 2)]
        assert worker.pool.num_free == worker.pool.num_total

    def test_all_are_cancelled_at_once(self) -> None:
        worker = ScriptedDecode(chunk_size=8)
        leader, *_ = worker.add_choices(choices("r", list(range(20)), 3))
        worker.step()
        worker.scheduler.cancel_all(leader.key.of_placement)
        assert worker.pool.num_free == worker.pool.num_total
        assert worker.scheduler.num_waiting == worker.scheduler.num_running == 0
        worker.scheduler.cancel_all(leader.key.of_placement)

    def test_nan_in_one_choice_ends_all_of_them_and_nobody_else(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", list(range(20)), 3))
        worker.add(sequence("other", list(range(20)), arrival=1))
        worker.step()
        worker.step("r")
        assert [(one.key, one.failure) for one in worker.told if one.failure] == [
            (key("r"), FailureCode.INVALID_LOGITS)
        ]
        assert all(worker.scheduler.sequence(key("r", choice)) is None for choice in range(3))
        worker.run_until_idle()
        assert worker.output("other") == solo(list(range(20)), 5)

    def test_no_block_of_a_choice_is_hit_after_another_one_had_nan(self) -> None:
        worker = ScriptedDecode(block_size=4)
        prompt = list(range(8))
        _, other = worker.add_choices(choices("r", prompt, max_tokens=20))
        for _ in range(10):
            worker.step()
        worker.step("r")
        worker.add(sequence("prompt", prompt))  # its blocks are good, and those of the answers stand behind them
        worker.run_until_idle()
        worker.add(sequence("answer", other.token_ids))
        worker.run_until_idle()
        assert worker.told[-1].num_cached == len(prompt)

    def test_a_choice_that_is_preempted_too_often_ends_all_of_them(self) -> None:
        worker = ScriptedDecode(5, 2, max_preemptions=0)
        worker.add_choices(choices("r", [1, 1], max_tokens=12))
        worker.run_until_idle()
        assert [one.failure for one in worker.told if one.failure] == [FailureCode.PREEMPTED]
        assert worker.pool.num_free == 5

    def test_two_that_are_preempted_too_often_at_once_are_one_failure(self) -> None:
        worker = ScriptedDecode(5, 2, max_preemptions=0)
        worker.add(sequence("a", [1]))
        worker.add(sequence("b", [2], arrival=1))
        worker.add_choices(choices("r", [3], 3, arrival=2))
        worker.run_until_idle()  # each of the old ones takes a page at the same step
        assert [(one.key, one.failure) for one in worker.told if one.failure] == [(key("r", 2), FailureCode.PREEMPTED)]
        assert [worker.output("a"), worker.output("b")] == [solo([1], 5), solo([2], 5)]

    def test_a_choice_that_is_preempted_comes_back(self) -> None:
        worker = ScriptedDecode(6, 2)
        worker.add_choices(choices("r", [1, 1], max_tokens=8))
        worker.run_until_idle()
        assert worker.scheduler.num_preemptions
        assert worker.outputs("r") == [solo([1, 1], 8, choice) for choice in range(2)]

    def test_placements_are_named_once(self) -> None:
        worker = ScriptedDecode(max_sequences=4, chunk_size=4, token_budget=8)
        worker.add_choices(choices("begun", list(range(20)), 2))
        worker.step()
        worker.add_choices(choices("waiting", list(range(50, 70)), 3, arrival=1))
        worker.step()
        assert worker.scheduler.unstarted() == [key("waiting")]
        worker.add(sequence("suspect", [1], arrival=2, runs_alone=True))
        assert worker.scheduler.displaced_by(key("suspect")) == [key("begun"), key("waiting")]
        while worker.scheduler.sequence(key("begun", 1)) and not worker.output("begun", 1):
            worker.step()
        assert worker.scheduler.displaced_by(key("suspect")) == [key("waiting")]


class TestRemote:
    """The leader's prompt is computed elsewhere, and its pages come for all."""

    def _reserve(self, worker: ScriptedDecode, request: list[Sequence]) -> Sequence:
        leader, *_ = worker.add_choices(request, Intake.REMOTE)
        assert worker.scheduler.admit().reserved == (leader,)
        return leader

    def _receive(self, worker: ScriptedDecode, leader: Sequence) -> FirstToken:
        worker.content.write(leader.token_ids, "", leader.block_ids, range(leader.num_computed, leader.num_tokens))
        return FirstToken(next_token(leader.token_ids), logprobs=likelihood(next_token(leader.token_ids)))

    def test_the_others_go_on_from_the_pages_that_came(self) -> None:
        worker = ScriptedDecode()
        prompt = list(range(40))
        leader = self._reserve(worker, choices("r", prompt, 3))
        assert not worker.step()
        assert (worker.scheduler.num_reserved, worker.scheduler.num_waiting) == (1, 2)
        first = worker.scheduler.activate(key("r"), self._receive(worker, leader))
        assert first is not None
        worker.told.append(first)
        assert num_computed(worker) == {"r": 2 + 3 * 4}
        assert worker.outputs("r", 3) == [solo(prompt, 5, choice) for choice in range(3)]

    def test_what_was_shown_and_cached_elsewhere_is_no_cached_part_of_the_prompt(self) -> None:
        worker = ScriptedDecode()
        leader = self._reserve(worker, choices("r", list(range(17)), max_tokens=40, num_shown=(16, 3)))
        first = self._receive(worker, leader)
        told = worker.scheduler.activate(key("r"), FirstToken(first.token, num_cached=32))
        assert told is not None
        assert told.num_cached == 17

    def test_b051_one_token_is_wanted_and_the_others_need_the_pages(self) -> None:
        worker = ScriptedDecode()
        prompt = list(range(40))
        leader = self._reserve(worker, choices("r", prompt, 2, max_tokens=1))
        assert len(leader.block_ids) == 3
        first = self._receive(worker, leader)
        assert worker.scheduler.conclude(key("r"), first) is None
        last = worker.scheduler.activate(key("r"), first)
        assert last is not None
        assert last.finish is FinishReason.LENGTH
        worker.run_until_idle()
        assert worker.output("r", 1) == solo(prompt, 1, 1)

    def test_the_last_choice_needs_no_pages_for_one_token(self) -> None:
        worker = ScriptedDecode()
        leader = self._reserve(worker, choices("r", list(range(40)), 2, max_tokens=1))
        worker.scheduler.cancel(key("r", 1))
        last = worker.scheduler.conclude(leader.key, FirstToken(3))
        assert last is not None
        assert last.finish is FinishReason.LENGTH

    def test_an_heir_computes_the_prompt_here(self) -> None:
        worker = ScriptedDecode()
        prompt = list(range(40))
        self._reserve(worker, choices("r", prompt, 3))
        assert worker.scheduler.cancel(key("r"))
        assert worker.scheduler.admit().reserved == ()
        worker.run_until_idle()
        assert worker.outputs("r", 3)[1:] == [solo(prompt, 5, choice) for choice in (1, 2)]

    def test_an_heir_that_waits_may_still_go_elsewhere(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", list(range(40)), 2), Intake.REMOTE)
        assert worker.scheduler.cancel(key("r"))
        assert [one.key for one in worker.scheduler.admit().reserved] == [key("r", 1)]

    def test_all_of_them_fall_back_alone(self) -> None:
        worker = ScriptedDecode()
        prompt = list(range(40))
        worker.add(sequence("other", [1], arrival=1, max_tokens=3))
        self._reserve(worker, choices("r", prompt, 2))
        worker.step()
        assert worker.scheduler.fall_back(key("r"), alone=True)
        worker.run_until_idle()
        assert [emission.key.request for emission in worker.told] == ["other"] * 3 + ["r"] * 10
        assert worker.outputs("r") == [solo(prompt, 5, choice) for choice in range(2)]


class TestLogprobs:
    """Each token has its own; those of the prompt are told once, whole, by whoever computed it."""

    def test_each_token_has_its_own(self) -> None:
        worker = ScriptedDecode()
        worker.add_choices(choices("r", [1, 2, 3], 2))
        worker.run_until_idle()
        assert [one.logprobs for one in worker.told] == [tuple(map(likelihood, one.token_ids)) for one in worker.told]

    def test_those_of_the_prompt_come_with_the_first_token(self) -> None:
        worker = ScriptedDecode(chunk_size=8)
        prompt = list(range(40))
        worker.add(sequence("before", prompt, max_tokens=1))
        worker.run_until_idle()
        leader, _ = worker.add_choices(choices("r", prompt, 2, num_prompt_logprobs=1))
        worker.step()
        assert leader.num_cached == 0
        worker.run_until_idle()
        told = [one.prompt_logprobs for one in worker.told if one.key.request == "r"]
        assert told == [tuple(map(likelihood, prompt[1:])), *[()] * 9]

    def test_an_heir_tells_them(self) -> None:
        worker = ScriptedDecode(chunk_size=8)
        prompt = list(range(40))
        worker.add_choices(choices("r", prompt, 2, num_prompt_logprobs=1))
        worker.step()
        worker.step()
        worker.scheduler.cancel(key("r"))
        worker.run_until_idle()
        assert worker.told[0].prompt_logprobs == tuple(map(likelihood, prompt[1:]))
        assert worker.told[0].key == key("r", 1)

    def test_a_prompt_that_is_computed_again_is_scored_again(self) -> None:
        worker = ScriptedDecode(8, 2, chunk_size=2, token_budget=8)
        prompt = list(range(5, 17))
        young = worker.add(sequence("young", prompt, arrival=9, max_tokens=1, num_prompt_logprobs=0))
        worker.step()
        worker.add(sequence("old", [1, 1, 1], arrival=1, max_tokens=6))
        worker.run_until_idle()
        (told,) = [one.prompt_logprobs for one in worker.told if one.key == key("young")]
        assert young.num_preemptions
        assert told == tuple(map(likelihood, prompt[1:]))
