"""Decode scheduler: prompts that are computed elsewhere and received page by page."""

from common.scheduling.emission import Emission
from common.scheduling.sequence import FinishReason, Sequence
from decode_worker.first_token import FirstToken
from decode_worker.ticket import Intake
from tests.support.scripted_decode import ScriptedDecode, solo
from tests.support.scripted_runner import next_token
from tests.support.sequences import key, sequence


class TestRemote:
    """Pages of a remote prefill are reserved whole, and decoding starts when token and pages are here."""

    def _reserve(self, worker: ScriptedDecode, remote: Sequence) -> Sequence:
        worker.add(remote, Intake.REMOTE)
        assert worker.scheduler.admit().reserved == (remote,)
        return remote

    def _receive(self, worker: ScriptedDecode, remote: Sequence) -> None:
        span = range(remote.num_computed, remote.num_tokens)
        worker.content.write(remote.token_ids, "", remote.block_ids, span)

    def test_the_whole_span_is_reserved_and_nothing_runs_yet(self) -> None:
        worker = ScriptedDecode()
        remote = self._reserve(worker, sequence("a", range(40)))
        assert len(remote.block_ids) == 3
        assert worker.scheduler.num_reserved == 1
        assert not worker.step()

    def test_decoding_goes_on_behind_the_first_token(self) -> None:
        worker = ScriptedDecode()
        remote = self._reserve(worker, sequence("a", range(40)))
        self._receive(worker, remote)
        first = worker.scheduler.activate(key("a"), FirstToken(next_token(remote.token_ids), num_cached=16))
        assert first == Emission(key("a"), 0, (next_token(list(range(40))),), 0, num_cached=16)
        worker.told.append(first)
        assert worker.scheduler.activate(key("a"), FirstToken(1)) is None
        worker.run_until_idle()
        assert worker.output("a") == solo(list(range(40)), 5)
        assert {emission.num_cached for emission in worker.told} == {16}

    def test_received_pages_are_cached(self) -> None:
        worker = ScriptedDecode()
        remote = self._reserve(worker, sequence("a", range(40)))
        self._receive(worker, remote)
        worker.scheduler.activate(key("a"), FirstToken(next_token(remote.token_ids)))
        other = self._reserve(worker, sequence("b", range(40), arrival=1))
        assert other.num_cached == 32

    def test_a_cancelled_reservation_is_not_cached(self) -> None:
        worker = ScriptedDecode()
        self._reserve(worker, sequence("a", range(40)))
        assert worker.scheduler.cancel(key("a"))
        assert worker.pool.num_cached == 0
        assert worker.pool.num_free == worker.pool.num_total

    def test_one_wanted_token_reserves_no_pages(self) -> None:
        """B051."""
        worker = ScriptedDecode()
        remote = self._reserve(worker, sequence("a", range(40), max_tokens=1))
        assert remote.block_ids == []
        last = worker.scheduler.activate(key("a"), FirstToken(3))
        assert last is not None
        assert (last.token_ids, last.finish) == ((3,), FinishReason.LENGTH)
        assert worker.scheduler.sequence(key("a")) is None

    def test_a_first_token_that_stops_needs_no_pages(self) -> None:
        """B051: `conclude` ends it though no page has come, and caches nothing."""
        worker = ScriptedDecode()
        self._reserve(worker, sequence("a", range(40), stop_ids=(3,)))
        assert worker.scheduler.conclude(key("a"), FirstToken(4)) is None
        last = worker.scheduler.conclude(key("a"), FirstToken(3))
        assert last is not None
        assert (last.token_ids, last.finish) == ((3,), FinishReason.STOP)
        assert worker.pool.num_free == worker.pool.num_total
        assert worker.pool.num_cached == 0

    def test_falling_back_computes_here_on_the_same_pages(self) -> None:
        worker = ScriptedDecode()
        remote = self._reserve(worker, sequence("a", range(40)))
        blocks = list(remote.block_ids)
        assert worker.scheduler.fall_back(key("a"))
        assert not worker.scheduler.fall_back(key("a"))
        assert remote.block_ids == blocks
        worker.run_until_idle()
        assert worker.output("a") == solo(list(range(40)), 5)

    def test_falling_back_without_pages_waits_for_some(self) -> None:
        worker = ScriptedDecode()
        self._reserve(worker, sequence("a", range(40), max_tokens=1))
        assert worker.scheduler.fall_back(key("a"))
        assert worker.scheduler.num_waiting == 1
        worker.run_until_idle()
        assert worker.output("a") == solo(list(range(40)), 1)

    def test_neither_kind_overtakes_the_other(self) -> None:
        worker = ScriptedDecode(4)
        worker.add(sequence("running", range(30), arrival=0, max_tokens=3))
        worker.step()
        large = worker.add(sequence("large", range(100, 150), arrival=1), Intake.REMOTE)
        small = worker.add(sequence("small", [1], arrival=2))
        assert worker.scheduler.admit().reserved == ()
        assert small.block_ids == []
        while worker.scheduler.num_running:
            worker.step()
        assert worker.scheduler.admit().reserved == (large,)
        assert small.block_ids == []
        assert worker.scheduler.cancel(key("large"))
        worker.run_until_idle()
        assert worker.output("small") == solo([1], 5)

    def test_a_reserved_sequence_holds_a_seat_and_is_never_preempted(self) -> None:
        worker = ScriptedDecode(4, 2, max_sequences=2)
        remote = self._reserve(worker, sequence("young", [1, 1, 1], arrival=5))
        running = worker.add(sequence("old", [2, 2, 2], arrival=1, max_tokens=9))
        for _ in range(6):
            worker.step()
        assert len(remote.block_ids) == 2
        assert len(running.block_ids) == 2
        assert running.num_preemptions == 0, "it waits with what it has"
        assert worker.scheduler.cancel(key("young"))
        worker.run_until_idle()
        assert worker.finish("old") is FinishReason.LENGTH
