"""Keys: one hash tag per model, and names that cannot break out of theirs."""

import pytest

from common.broker.keys import Keys, escape
from common.messages.ids import Epoch, Fingerprint, ModelName, WorkerId

ODD_NAMES = ["a", "acme/Model-7B", "a}b", "{a}", "a:b", "a\nb", "a b", "a%7Db", "模型", "\ud800", "a\0b"]


def all_keys(keys: Keys) -> list[str]:
    """Return one key of every kind."""
    lane = keys.lane(WorkerId("w"), Epoch(1))
    return [*keys.queue, *keys.registry, keys.card, *lane, keys.prefill(Fingerprint("f"))]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_all_keys_of_a_model_share_one_hash_tag(name: str) -> None:
    tags = set()
    for key in all_keys(Keys(ModelName(name))):
        opening = key.index("{")
        tags.add(key[opening + 1 : key.index("}", opening)])
        assert key.isascii()
        assert key.isprintable()
    assert tags == {escape(name)}


def test_different_names_have_different_keys() -> None:
    assert len({escape(name) for name in ODD_NAMES}) == len(ODD_NAMES)
    keys = Keys(ModelName("m"))
    assert len(set(all_keys(keys))) == len(all_keys(keys)) - 1  # `workers` is in both lists
    assert keys.jobs(WorkerId("w:1"), Epoch(2)) != keys.jobs(WorkerId("w"), Epoch(12))


def test_a_model_without_a_name_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Keys(ModelName(""))
