"""Room that placements need: each choice has its own last prompt block and its own next step."""

import pytest

from common.errors import InvalidRequest
from gateway.room import blocks_needed, check_room
from tests.support.broker_records import worker_record


@pytest.mark.parametrize(
    ("num_prompt", "nums_shown", "num_blocks"),
    [
        (1, [0], 1),
        (15, [0], 1),
        (16, [0], 2),
        (16, [15], 2),
        (16, [16], 3),
        (15, [0, 0, 0], 3),
        (16, [0, 0, 0], 6),
        (17, [0, 0, 0], 4),
        (40, [0, 30], 2 + 1 + 3),
    ],
)
def test_blocks_of_all_choices(num_prompt: int, nums_shown: list[int], num_blocks: int) -> None:
    assert blocks_needed(num_prompt, nums_shown, 16) == num_blocks


def test_the_largest_worker_decides() -> None:
    workers = [worker_record(num_blocks=2), worker_record(num_blocks=8)]
    assert check_room(workers, 40, [0, 0]) == 4


def test_a_prompt_beyond_every_pool_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt of 100 tokens exceeds the KV capacity of 64 tokens") as refusal:
        check_room([worker_record(num_blocks=4)], 100, [0, 0])
    assert refusal.value.param == "prompt"


def test_more_answers_than_any_pool_holds_are_refused_with_both_numbers() -> None:
    with pytest.raises(
        InvalidRequest, match=r"3 answers to a prompt of 40 tokens need 80 tokens .* 64 tokens"
    ) as refusal:
        check_room([worker_record(num_blocks=4)], 40, [0, 0, 0])
    assert refusal.value.param == "n"


@pytest.mark.parametrize(("nums_shown", "num_blocks"), [([0, 0, 0], 5), ([60, 60, 60], 7), ([80, 1, 1], 8)])
def test_what_was_shown_of_several_answers_need_not_fit_at_once(nums_shown: list[int], num_blocks: int) -> None:
    assert check_room([worker_record(num_blocks=8)], 40, nums_shown) == num_blocks


def test_more_answers_than_any_worker_has_seats_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match="n is 9, but no worker generates more than 8 at once"):
        check_room([worker_record()], 1, [0] * 9)
