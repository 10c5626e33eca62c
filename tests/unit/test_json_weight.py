"""How much there is to a body, before it is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from gateway import json_weight
from gateway.json_weight import check_weight

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\,[{\n日'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='a"\\'), inner, max_size=5),
    max_leaves=30,
)


def num_parts(value: object) -> int:
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(num_parts, value))
        case dict():
            return 1 + len(value) + sum(map(num_parts, value.values()))
        case _:
            return 0


def is_light(body: bytes, max_parts: int, max_numbers: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_weight, "MAX_PARTS", max_parts)
        patch.setattr(json_weight, "MAX_NUMBERS", max_numbers)
        patch.setattr(json_weight, "PIECE", 7)
        try:
            check_weight(body)
        except InvalidRequest:
            return False
    return True


@given(VALUES, st.booleans())
def test_texts_lists_and_objects_are_counted_and_nothing_inside_texts(value: object, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    exact = num_parts(value)
    assert is_light(body, exact + 1, 10_000)
    assert not exact or not is_light(body, exact - 1, 10_000)


@given(st.lists(st.integers(), min_size=1, max_size=50), st.text(alphabet='",'))
def test_numbers_are_counted(numbers: list[int], text: str) -> None:
    body = json.dumps([numbers, text]).encode()
    assert is_light(body, 10_000, len(numbers))
    assert not is_light(body, 10_000, len(numbers) - 1)


@given(st.binary(max_size=100))
def test_what_is_no_json_is_somebody_elses_business(body: bytes) -> None:
    assert is_light(body, 10_000, 10_000)
