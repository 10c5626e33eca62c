"""Jobs on their way into a decode worker: long prompts, repeats, newer placements, refusals, and the room they took."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

import decode_worker.intake
from common.broker.protocols import Candidate, Placed, QueuedJob, Whereabouts
from common.messages.ids import ChoiceIndex, EntryId, Epoch, PlacementNumber, RequestId, WorkerId
from common.messages.job import Job, OpenChoice
from common.messages.registry import WorkerHealth
from decode_worker.worker import DecodeWorker
from tests.support.feed_client import Answer, FeedClient, make_choices, make_job
from tests.support.polling import until
from tests.support.tagged_pages import VOCABULARY, answer
from tests.support.worker_fabric import MAX_CONTEXT, Fabric, Node, running_fabric

PROMPT = list(range(700, 720))
TOKENS = answer(PROMPT, 5)


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def decode(fabric: Fabric) -> Node[DecodeWorker]:
    return await fabric.decode()


@pytest.fixture
async def client(fabric: Fabric, decode: Node[DecodeWorker]) -> AsyncIterator[FeedClient]:
    yield await fabric.client(decode.record)
    await fabric.until_idle()


def deliver(decode: Node[DecodeWorker], job: Job, entry: str = "1-0") -> None:
    """Deliver a job (again), as a broker may do."""
    decode.worker._intake.accept(QueuedJob(EntryId(entry), job))


async def test_a_long_prompt_is_brought_after_acceptance(decode: Node[DecodeWorker], client: FeedClient) -> None:
    await client.place(make_job("r", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("r"), "accepted")
    assert client.events["r", 1][0].accepted.needs_prompt
    decode.valve.close()
    assert await client.send_prompt(decode.record, "r", PROMPT)
    assert await client.send_prompt(decode.record, "r", PROMPT)  # again, in case the answer was lost
    decode.valve.open()
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert not await client.send_prompt(decode.record, "r", PROMPT)
    assert not await client.send_prompt(decode.record, "never seen", PROMPT)


async def test_a_long_prompt_that_never_comes(
    fabric: Fabric, decode: Node[DecodeWorker], client: FeedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker.intake, "PROMPT_TIMEOUT_S", 0.02)
    await client.place(make_job("r", PROMPT, has_prompt=False), decode.record)
    assert await client.answer("r") == Answer([], "stale")
    assert client.events["r", 1][-1].failed.is_retryable
    await _is_absorbed(fabric, decode, "r")
    assert not await client.send_prompt(decode.record, "r", PROMPT)  # too late
    await client.place(make_job("r", PROMPT, placement=2), decode.record)
    assert (await client.answer("r", 2)).tokens == TOKENS


async def test_a_pause_of_the_worker_is_no_missing_prompt_however_long_its_leases(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker.intake, "PROMPT_TIMEOUT_S", 1.6)
    decode = await fabric.decode(lease_s=600.0)
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("r"), "accepted")
    time.sleep(1.7)  # noqa: ASYNC251 - the loop is paused
    assert await client.send_prompt(decode.record, "r", PROMPT)
    assert await client.answer("r") == Answer(TOKENS, "length")


async def test_a_job_that_waits_for_its_prompt_is_cancelled(decode: Node[DecodeWorker], client: FeedClient) -> None:
    await client.place(make_job("r", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("r"), "accepted")
    await client.cancel(decode.record, "r")
    assert not await client.send_prompt(decode.record, "r", PROMPT)
    assert not decode.valve.spans


async def test_a_job_that_is_delivered_twice_runs_once(decode: Node[DecodeWorker], client: FeedClient) -> None:
    decode.valve.close()
    deliver(decode, make_job("r", PROMPT))
    deliver(decode, make_job("r", PROMPT), "2-0")
    decode.valve.open()
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert client.kinds("r").count("accepted") == 1


@pytest.mark.parametrize("end", ["finished", "cancelled", "prompt missed"])
async def test_b054_a_job_that_is_over_does_not_come_back(
    decode: Node[DecodeWorker], client: FeedClient, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(decode_worker.intake, "PROMPT_TIMEOUT_S", 0.0)
    job = make_job("r", PROMPT, has_prompt=end == "finished")
    deliver(decode, job)
    if end == "cancelled":
        await client.cancel(decode.record, "r")
    await until(lambda: not len(decode.worker._ledger), "it is over")
    kinds = client.kinds("r")
    deliver(decode, make_job("r", PROMPT), "2-0")
    deliver(decode, make_job("next", PROMPT), "3-0")
    assert (await client.answer("next")).tokens == TOKENS
    assert client.kinds("r")[len(kinds) :].count("accepted") == 0


async def test_a_higher_placement_supersedes(decode: Node[DecodeWorker], client: FeedClient) -> None:
    decode.valve.close()
    deliver(decode, make_job("r", PROMPT, placement=1))
    await until(lambda: decode.valve.is_holding, "it runs")
    deliver(decode, make_job("r", PROMPT, placement=3, shown=TOKENS[:2]), "2-0")
    deliver(decode, make_job("r", PROMPT, placement=2), "3-0")  # late
    decode.valve.open()
    assert (await client.answer("r", 3)).tokens == TOKENS[2:]
    assert client.kinds("r", 1) == ["accepted"]
    assert not client.kinds("r", 2)


async def test_a_cancel_of_an_older_placement_leaves_the_newer_one(
    decode: Node[DecodeWorker], client: FeedClient
) -> None:
    deliver(decode, make_job("r", PROMPT, placement=2))
    await client.cancel(decode.record, "r", 1)
    assert (await client.answer("r", 2)).tokens == TOKENS


def with_choices(*choices: int) -> Job:
    opened = tuple(OpenChoice(ChoiceIndex(choice)) for choice in choices)
    return msgspec.structs.replace(make_job("r", PROMPT), choices=opened)


def biased(*logit_bias: tuple[int, float]) -> Job:
    job = make_job("r", PROMPT)
    return msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, logit_bias=logit_bias))


REFUSED = {
    "no prompt at all": make_job("r", []),
    "too long": make_job("r", range(MAX_CONTEXT)),
    "too long with what was shown": make_job("r", range(MAX_CONTEXT - 3), shown=[1, 2, 3], max_tokens=9),
    "outside of the vocabulary": make_job("r", [1, VOCABULARY]),
    "shown is outside of it": make_job("r", [1], shown=[VOCABULARY]),
    "stop ids are outside of it": make_job("r", [1], stop_ids=(VOCABULARY,)),
    "another length than announced": msgspec.structs.replace(make_job("r", [1, 2]), num_prompt_tokens=3),
    "no whole number of ids": msgspec.structs.replace(make_job("r", [1]), prompt=b"\1\0\0\0\0"),
    "nothing left to generate": make_job("r", PROMPT, shown=TOKENS, max_tokens=5),
    "nothing left of one choice": make_choices("r", PROMPT, {0: [], 1: TOKENS}, max_tokens=5),
    "one choice is too long": make_choices("r", range(MAX_CONTEXT - 3), {0: [], 1: [1, 2, 3]}, max_tokens=9),
    "one choice is outside of the vocabulary": make_choices("r", [1], {0: [], 1: [VOCABULARY]}),
    "no choices": make_choices("r", PROMPT, {}),
    "choices that come twice": with_choices(1, 1),
    "choices in no order": with_choices(1, 0),
    "a choice beyond all": with_choices(0, 128),
    "too many logprobs": make_choices("r", PROMPT, {0: []}, num_logprobs=21),
    "too many logprobs of the prompt": make_choices("r", PROMPT, {0: []}, num_prompt_logprobs=21),
    "biased ids are outside of the vocabulary": biased((1, 1.0), (VOCABULARY, 1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_job_that_cannot_run_fails_alone(
    fabric: Fabric, decode: Node[DecodeWorker], client: FeedClient, case: str
) -> None:
    await client.place(REFUSED[case], decode.record)
    assert await client.answer("r") == Answer([], "invalid_request")
    assert not client.events["r", 1][-1].failed.is_retryable
    await _is_absorbed(fabric, decode, "r")
    await client.place(make_job("next", PROMPT), decode.record)
    assert (await client.answer("next")).tokens == TOKENS


async def test_a_prompt_that_the_pool_cannot_hold(fabric: Fabric) -> None:
    decode = await fabric.decode(num_blocks=4)
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    assert await client.answer("r") == Answer([], "too_long")
    await client.place(make_job("next", PROMPT[:8]), decode.record)
    assert (await client.answer("next")).tokens == answer(PROMPT[:8], 5)
    await fabric.until_idle()


async def test_a_job_takes_room_until_it_is_absorbed_and_no_longer(fabric: Fabric) -> None:
    decode = await fabric.decode(max_sequences=2, num_blocks=32)
    client = await fabric.client(decode.record)
    candidate = Candidate(decode.record.worker, decode.record.epoch)
    for number in range(8):  # each takes one of two seats and a quarter of the pages, and none is started
        buried, refused = make_job(f"buried {number}", PROMPT), make_job(f"refused {number}", [])
        await client.cancel(decode.record, buried.request)
        for job in (buried, refused):
            assert isinstance(await fabric.broker.jobs.place(job, 8, [candidate]), Placed)
        for job in (buried, refused):
            await _is_absorbed(fabric, decode, job.request)
    await fabric.until_idle()


async def test_a_placement_whose_time_is_over_ends_though_its_gateway_is_silent(
    fabric: Fabric, decode: Node[DecodeWorker], client: FeedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_worker.intake, "DEADLINE_GRACE_S", 0.01)
    decode.valve.close()
    await client.place(timed("running", 0.05), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    await client.place(timed("long", 0.05, has_prompt=False), decode.record)
    for name in ("running", "long"):
        assert await client.answer(name) == Answer([], "deadline_exceeded")
        assert not client.events[name, 1][-1].failed.is_retryable
    assert not len(decode.worker._ledger)
    decode.valve.open()


@pytest.mark.parametrize("time_left_s", [0.0, -3.0])
async def test_a_job_that_comes_too_late_is_not_computed(
    fabric: Fabric, decode: Node[DecodeWorker], client: FeedClient, time_left_s: float
) -> None:
    await client.place(timed("r", time_left_s), decode.record)
    assert await client.answer("r") == Answer([], "deadline_exceeded")
    await _is_absorbed(fabric, decode, "r")
    assert not decode.valve.spans


async def test_a_placement_within_its_time_is_left_alone(decode: Node[DecodeWorker], client: FeedClient) -> None:
    await client.place(timed("r", 600.0), decode.record)
    assert await client.answer("r") == Answer(TOKENS, "length")


async def test_what_cannot_be_finished_is_handed_back(fabric: Fabric) -> None:
    decode = await fabric.decode(drain_s=0)
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await client.place(make_job("long", PROMPT, has_prompt=False), decode.record)
    await until(lambda: client.kinds("long"), "both are accepted")
    decode.signals.stop.set()
    for name in ("r", "long"):
        assert (await client.answer(name)).reason == "worker_draining"
        assert client.events[name, 1][-1].failed.is_retryable
    decode.valve.open()
    assert await decode.task == 0


async def test_running_work_is_finished_before_leaving(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    decode.signals.stop.set()
    decode.valve.open()
    assert await client.answer("r") == Answer(TOKENS, "length")
    assert await decode.task == 0


async def test_what_has_not_begun_is_handed_back_at_once_and_the_rest_finished(fabric: Fabric) -> None:
    decode = await fabric.decode(max_sequences=1)
    client = await fabric.client(decode.record)
    decode.valve.close()
    deliver(decode, make_job("running", PROMPT))
    await until(lambda: decode.valve.is_holding, "it runs")
    deliver(decode, make_job("waiting", PROMPT), "2-0")
    deliver(decode, make_job("long", PROMPT, has_prompt=False), "3-0")
    decode.valve.let(2)
    await until(lambda: decode.edge.load.num_waiting == 1, "one waits for its seat")
    decode.signals.stop.set()
    assert await client.answer("long") == Answer([], "worker_draining")
    deliver(decode, make_job("unread", PROMPT), "4-0")
    assert await client.answer("unread") == Answer([], "worker_draining")
    decode.valve.let(1)
    assert await client.answer("waiting") == Answer([], "worker_draining")
    assert len(decode.worker._ledger) == 1
    decode.valve.open()
    assert await client.answer("running") == Answer(TOKENS, "length")
    assert await decode.task == 0


async def test_a_reception_is_handed_back_when_its_worker_leaves(fabric: Fabric) -> None:
    decode, prefill, client = await fabric.pair()
    prefill.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: prefill.valve.is_holding, "its prompt is being computed")
    decode.signals.stop.set()
    assert await client.answer("r") == Answer([], "worker_draining")
    assert await decode.task == 0
    await until(lambda: not len(prefill.worker._holdings), "the prefill worker knows")
    prefill.valve.open()
    await fabric.until_idle()


async def test_a_job_that_is_placed_as_its_worker_leaves_is_handed_back(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fabric.broker.jobs.read

    async def slow_read(worker: WorkerId, epoch: Epoch, after: EntryId | None, block_s: float) -> list[QueuedJob]:
        if block_s:  # an answer that is under way when the signal comes
            await asyncio.Event().wait()
        return await read(worker, epoch, after, block_s)

    monkeypatch.setattr(fabric.broker.jobs, "read", slow_read)
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await client.place(make_job("r", PROMPT), decode.record)
    decode.signals.stop.set()
    assert await client.answer("r") == Answer([], "worker_draining")
    assert await decode.task == 0
    assert not decode.valve.spans


async def test_a_second_signal_hands_back_what_runs(fabric: Fabric) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_job("r", PROMPT), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    decode.signals.receive()
    await until(lambda: decode.edge.health is WorkerHealth.DRAINING, "it drains")
    assert client.kinds("r") == ["accepted"]
    decode.signals.receive()
    assert (await client.answer("r")).reason == "worker_draining"
    decode.valve.open()
    assert await decode.task == 0


def timed(request: str, time_left_s: float, *, has_prompt: bool = True) -> Job:
    """Return a job with a deadline."""
    return msgspec.structs.replace(make_job(request, PROMPT, has_prompt=has_prompt), time_left_s=time_left_s)


async def _is_absorbed(fabric: Fabric, decode: Node[DecodeWorker], request: str) -> None:
    """Wait until the first placement's job does not take room in the stream any more."""
    queue = fabric.broker.jobs._queue
    await until(lambda: decode.edge.load.absorbed is not None, "the engine knows of the job")
    await until(
        lambda: queue.whereabouts(RequestId(request), PlacementNumber(1)) == Whereabouts.UNKNOWN, "its entry is trimmed"
    )
