"""Feeds carry every event in order to whoever reads for a gateway, and give up a gateway that stays away."""

import asyncio

import pytest

from common.messages.ids import GatewayId
from common.rpc.options import MAX_MESSAGE_BYTES
from common.runtime import feeds as feeds_module
from common.runtime.feeds import FeedHub
from proto import worker_pb2 as pb
from tests.support.polling import turns, until

GATEWAY = GatewayId("g")
DEADLINE_S = 20.0


def event(number: int) -> pb.FeedEvent:
    return pb.FeedEvent(request=str(number))


async def read(hub: FeedHub, count: int) -> list[str]:
    names: list[str] = []
    async with asyncio.timeout(2):
        async for frame in hub.serve(GATEWAY):
            names.extend(item.request for item in frame.events)
            if len(names) >= count:
                return names
    return names


async def test_events_from_before_the_connection_are_kept_in_order() -> None:
    hub = FeedHub(lambda gateway: None)
    for number in range(3):
        hub.push(GATEWAY, event(number))
    assert await read(hub, 3) == ["0", "1", "2"]


async def test_events_that_are_ready_together_leave_in_one_frame() -> None:
    hub = FeedHub(lambda gateway: None)
    frames = hub.serve(GATEWAY)
    assert not (await anext(frames)).events
    hub.push(GATEWAY, event(1))
    hub.push(GATEWAY, event(2))
    assert [item.request for item in (await anext(frames)).events] == ["1", "2"]
    await frames.aclose()


async def test_logprobs_of_prompts_end_a_frame_so_that_none_is_too_large() -> None:
    hub = FeedHub(lambda gateway: None)
    large = [pb.TokenLogprobs(logprob=-1.0, top_ids=range(5), top_logprobs=[-1.0] * 5)] * 100_000
    for number in range(30):
        hub.push(GATEWAY, event(number))
        if number % 2:
            hub.push(GATEWAY, pb.FeedEvent(request=f"{number}!", tokens=pb.Tokens(prompt_logprobs=large)))
    names: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for frame in hub.serve(GATEWAY):
            assert frame.ByteSize() < MAX_MESSAGE_BYTES / 8
            names.extend(item.request for item in frame.events)
            if len(names) == 45:
                break
    assert names == [name for number in range(30) for name in ([f"{number}", f"{number}!"][: 1 + number % 2])]


async def test_a_silent_feed_sends_empty_frames_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "KEEP_ALIVE_S", 0.01)
    hub = FeedHub(lambda gateway: None)
    frames = hub.serve(GATEWAY)
    await anext(frames)
    hub.num_steps = 7
    async with asyncio.timeout(2):
        frame = await anext(frames)
    assert (len(frame.events), frame.num_steps) == (0, 7)
    await frames.aclose()


async def test_a_gateway_that_stays_away_is_lost_once() -> None:
    lost: asyncio.Queue[GatewayId] = asyncio.Queue()
    hub = FeedHub(lost.put_nowait, grace_s=0.01)
    frames = hub.serve(GATEWAY)
    await anext(frames)
    await frames.aclose()
    async with asyncio.timeout(2):
        assert await lost.get() == GATEWAY
    assert lost.empty()


async def test_a_gateway_that_comes_back_in_time_is_not_lost() -> None:
    lost: list[GatewayId] = []
    hub = FeedHub(lost.append, grace_s=0.05)
    first = hub.serve(GATEWAY)
    await anext(first)
    await first.aclose()
    hub.push(GATEWAY, event(1))
    second = hub.serve(GATEWAY)
    assert [item.request for item in (await anext(second)).events] == ["1"]
    await asyncio.sleep(0.1)  # twice the grace period: nothing may happen in it
    assert lost == []
    await second.aclose()


async def test_a_gateway_that_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "MAX_PENDING_EVENTS", 3)
    lost: list[GatewayId] = []
    hub = FeedHub(lost.append)
    for number in range(4):
        hub.push(GATEWAY, event(number))
    assert lost == [GATEWAY]


async def test_a_stall_is_told_at_once_and_with_every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "KEEP_ALIVE_S", 60.0)
    hub = FeedHub(lambda gateway: None)
    frames = hub.serve(GATEWAY)
    assert not (await anext(frames)).is_stalled
    waiting = asyncio.ensure_future(anext(frames))
    await turns()
    hub.tell_stalled(True)
    async with asyncio.timeout(5):
        assert (await waiting).is_stalled
    monkeypatch.setattr(feeds_module, "KEEP_ALIVE_S", 0.01)
    async with asyncio.timeout(5):
        keep_alive = await anext(frames)
    assert (list(keep_alive.events), keep_alive.is_stalled) == ([], True)
    hub.push(GATEWAY, event(1))
    assert (await anext(frames)).is_stalled
    hub.tell_stalled(False)
    assert not (await anext(frames)).is_stalled
    other = hub.serve(GatewayId("other"))
    assert not (await anext(other)).is_stalled
    await frames.aclose()
    await other.aclose()


async def test_a_pause_of_the_worker_does_not_lose_a_gateway() -> None:
    """The grace period ends by the clock that stands still while the worker cannot read who has come back."""
    now_s, num_looks = 0.0, 0
    lost: list[GatewayId] = []

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return now_s

    hub = FeedHub(lost.append, grace_s=0.02, clock=clock)
    hub.push(GATEWAY, event(1))
    await until(lambda: num_looks > 2, "the timer has struck")
    assert lost == []
    now_s = 0.03
    await until(lambda: lost == [GATEWAY], "time has passed by the clock, too")
