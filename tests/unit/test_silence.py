"""Who was silent for too long, in the eyes of a process that may have been paused itself."""

from itertools import count

from gateway.silence import GRACE_S, LOOK_S, TOLERANCE_S, SilenceWatch

LIMIT_S = 4.0
PAUSE_S = 15.0


def looks(watch: SilenceWatch[str], begin_s: float, end_s: float) -> list[tuple[float, str]]:
    """Look as often as the owner does; return who was found silent, and when."""
    times = (begin_s + number * LOOK_S for number in count())
    found: list[tuple[float, str]] = []
    for now_s in times:
        if now_s > end_s:
            return found
        for source in watch.look(now_s):
            watch.forget(source)
            found.append((now_s, source))
    raise AssertionError("time does not end")


def test_silence_is_found_at_the_limit() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LIMIT_S)
    watch.heard("a", 0.0)
    watch.heard("b", 3.0)
    assert looks(watch, 0.0, 20.0) == [(LIMIT_S, "a"), (LIMIT_S + 3.0, "b")]


def test_who_is_forgotten_is_not_judged() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LIMIT_S)
    watch.heard("a", 0.0)
    watch.forget("a")
    watch.forget("a")
    assert looks(watch, 0.0, 20.0) == []


def test_nobody_is_judged_for_our_own_pause() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LIMIT_S)
    watch.heard("alive", 0.0)
    watch.heard("dead", 0.0)
    assert looks(watch, 0.0, 1.0) == []
    resumed_s = 1.0 + PAUSE_S
    assert watch.look(resumed_s) == []
    watch.heard("alive", resumed_s + 0.1)  # its frames waited in the socket
    assert looks(watch, resumed_s + LOOK_S, resumed_s + LIMIT_S - LOOK_S) == [(resumed_s + GRACE_S, "dead")]


def test_who_asks_first_after_a_pause_is_told() -> None:
    """A connection that broke meanwhile is read before the next look."""
    watch: SilenceWatch[str] = SilenceWatch(LIMIT_S)
    watch.look(0.0)
    assert not watch.was_paused(0.4)
    assert watch.was_paused(0.4 + PAUSE_S)
    assert watch.was_paused(0.4 + PAUSE_S + GRACE_S / 2)
    assert not watch.was_paused(0.4 + PAUSE_S + GRACE_S)


def test_a_busy_loop_is_no_pause() -> None:
    watch: SilenceWatch[str] = SilenceWatch(LIMIT_S)
    watch.heard("a", 0.0)
    times = [number * (LOOK_S + TOLERANCE_S) for number in range(10)]
    assert next(now_s for now_s in times if watch.look(now_s)) == times[3]
