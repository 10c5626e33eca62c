"""What a worker tells of its cache: changes only, bounded, and everything again after a loss."""

import asyncio
from collections.abc import Sequence

import pytest

from common.broker.memory_broker import MemoryBroker
from common.broker.protocols import PrefixNews
from common.cache.journal import PrefixJournal
from common.errors import BrokerUnavailable
from common.messages.ids import Epoch, WorkerId
from common.messages.prefixes import PromptPrefixes
from common.runtime import prefix_teller as teller_module
from common.runtime.prefix_teller import PrefixTeller
from tests.support.background import running
from tests.support.broker_records import D0, EPOCH, MODEL, worker_load, worker_record
from tests.support.polling import until


class Listener:
    """An index that remembers what it was told, and can be away: before it takes a message in, or before it answers."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(MODEL)
        self.messages: list[PrefixNews] = []
        self.is_away = self.is_mute = False
        self.journal = PrefixJournal()
        self.teller = PrefixTeller(self, D0, EPOCH, self.journal, max_told=5)

    async def tell(self, worker: WorkerId, epoch: Epoch, news: PrefixNews) -> bool:
        """Take the news in."""
        if self.is_away:
            raise BrokerUnavailable("away")
        self.messages.append(news)
        is_right = await self.broker.prefixes.tell(worker, epoch, news)
        if self.is_mute:
            raise BrokerUnavailable("no answer")
        return is_right

    async def depths(self, workers: Sequence[tuple[WorkerId, Epoch]], prefixes: PromptPrefixes) -> list[int]:
        """Return what is known."""
        return await self.broker.prefixes.depths(workers, prefixes)

    def note(self, *names: bytes, is_there: bool = True) -> None:
        """Something happens in the cache."""
        for name in names:
            self.journal.note(name, is_there=is_there)

    def knows(self, name: bytes) -> bool:
        """Whether a gateway would find that prefix."""
        return self.broker.prefixes.num_cached(D0, EPOCH, PromptPrefixes((name,))) > 0

    async def known(self, *names: bytes) -> str:
        """Tell until nothing is left to tell; return which of the names are known then."""
        while await self.teller.tell():
            pass
        return b"".join(name for name in names if self.knows(name)).decode()


@pytest.fixture
def listener() -> Listener:
    return Listener()


async def test_only_changes_are_told(listener: Listener) -> None:
    listener.note(b"a", b"b")
    assert await listener.known(b"a", b"b", b"c") == "ab"
    listener.note(b"c")
    listener.note(b"a", b"never told", is_there=False)
    assert await listener.known(b"a", b"b", b"c") == "bc"
    assert [(list(news.added), list(news.removed)) for news in listener.messages] == [
        ([b"a", b"b"], []),
        ([b"c"], [b"a"]),
    ]
    assert not await listener.teller.tell()


async def test_what_came_and_went_is_not_told(listener: Listener) -> None:
    listener.note(b"a")
    listener.note(b"a", is_there=False)
    assert await listener.known(b"a") == ""
    assert listener.messages == []


async def test_a_redis_that_was_away_hears_it_later(listener: Listener) -> None:
    listener.is_away = True
    listener.note(b"a")
    with pytest.raises(BrokerUnavailable):
        await listener.teller.tell()
    listener.is_away = False
    assert await listener.known(b"a") == "a"


async def test_everything_is_told_again_after_a_loss(listener: Listener) -> None:
    listener.note(b"a", b"b")
    await listener.known()
    listener.broker.prefixes.forget(D0, EPOCH)
    listener.note(b"b", is_there=False)
    listener.note(b"c")
    assert await listener.known(b"a", b"b", b"c") == "ac"


async def test_a_check_notices_a_loss(listener: Listener) -> None:
    listener.note(b"a")
    await listener.known()
    listener.broker.prefixes.forget(D0, EPOCH)
    assert await listener.known(b"a") == ""  # nothing has changed
    await listener.teller.tell(is_check=True)
    assert await listener.known(b"a") == "a"


async def test_a_message_whose_answer_is_lost_leaves_no_difference(listener: Listener) -> None:
    listener.note(b"a")
    listener.is_mute = True
    with pytest.raises(BrokerUnavailable):
        await listener.teller.tell()
    listener.is_mute = False
    listener.note(b"a", is_there=False)
    listener.note(b"b")
    assert await listener.known(b"a", b"b") == "b"


async def test_of_too_many_the_oldest_are_withdrawn(listener: Listener) -> None:
    names = [bytes([letter]) for letter in b"abcdefgh"]
    listener.note(*names[:4])
    assert await listener.known(*names) == "abcd"
    listener.note(*names[4:])
    assert await listener.known(*names) == "defgh"
    listener.note(b"a", b"d", is_there=False)
    listener.note(b"i")
    assert await listener.known(*names, b"i") == "efghi"
    listener.broker.prefixes.forget(D0, EPOCH)
    await listener.teller.tell(is_check=True)
    assert await listener.known(*names, b"i") == "efghi"


async def test_much_is_told_in_parts(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teller_module, "MAX_CHANGES", 2)
    listener.note(b"a", b"b", b"c", b"d", b"e")
    assert await listener.known(b"a", b"b", b"c", b"d", b"e") == "abcde"
    assert [len(news.added) for news in listener.messages] == [2, 2, 1]


async def test_it_is_told_in_time_and_goes_on_when_redis_comes_back(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teller_module, "INTERVAL_S", 0.005)
    monkeypatch.setattr(teller_module, "CHECK_INTERVAL_S", 0.02)
    await listener.broker.registry.beat(worker_record(), worker_load())
    listener.is_away = True
    async with running(listener.teller.run()):
        listener.note(b"a")
        await asyncio.sleep(0)
        listener.is_away = False
        await until(lambda: listener.knows(b"a"), "it is told")
        listener.broker.prefixes.forget(D0, EPOCH)
        await until(lambda: listener.knows(b"a"), "the loss is noticed")
