"""Readiness over real feeds and scripted workers: only tokens that came back make a gateway ready."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.messages.ids import RequestId
from common.messages.sampling import SamplingParams
from gateway.canary_targets import list_targets
from gateway.engine import GenerateRequest
from tests.support.canary_harness import RARELY_S, CanaryHarness, canary_harness
from tests.support.dispatch_harness import DEADLINE_S, answer, ids_of, job_of
from tests.support.polling import until
from tests.support.scripted_worker import MODEL


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CanaryHarness]:
    async with canary_harness(monkeypatch) as running:
        yield running


async def test_not_ready_until_the_first_canary_has_come_back(harness: CanaryHarness) -> None:
    player = await harness.add_player("decode-0", 1, hangs=True)
    harness.send_canaries(RARELY_S)
    assert "no canary has come back" in harness.reason
    await until(lambda: player.seen)
    job = player.seen[0]
    assert (job.num_prompt_tokens, job.sampling.max_tokens, job.sampling.stop_ids) == (33, 2, ())
    assert job.time_left_s is not None
    assert "decode-0" in harness.reason
    answer(player.worker, job, [9, 10])
    await until(lambda: not harness.reason)


async def test_b110_a_wedged_worker_makes_unready_although_its_feed_is_fine(harness: CanaryHarness) -> None:
    player = await harness.add_player("decode-0", 1)
    harness.send_canaries(0.1)
    await harness.until_ready()
    player.hangs = True
    await until(lambda: harness.reason, "unready", DEADLINE_S)
    assert harness.reason.endswith("s: decode-0 (nothing came back within 2 s)")
    assert harness.metrics.registry.get_sample_value("tandem_canary_failures_total") == 1
    assert [state.record.worker for state in harness.roster.open_workers(MODEL)] == ["decode-0"]  # its feed is fine
    player.hangs = False
    await harness.until_ready()


async def test_a_wedged_worker_of_two_gets_nothing_and_the_gateway_stays_ready(harness: CanaryHarness) -> None:
    good = await harness.add_player("decode-0", 1)
    bad = await harness.add_player("decode-1", 2, hangs=True)
    harness.send_canaries(RARELY_S)
    proofs = harness.dispatcher.proofs
    await until(lambda: [state.record.worker for state in harness.roster.decode_workers(MODEL)] == ["decode-0"])
    assert not harness.reason
    requests = [request(f"r{number}") for number in range(8)]
    for events in await asyncio.gather(*map(harness.collect, requests)):
        assert ids_of(events) == [9, 10]
    ours = {each.request for each in requests}
    assert ours <= {job.request for job in good.seen}
    assert not ours & {job.request for job in bad.seen}
    bad.hangs = False
    await until(lambda: len(harness.roster.decode_workers(MODEL)) == 2, "trusted again", DEADLINE_S)
    assert all(proofs.age_s(target.source) is not None for target in list_targets(harness.roster))


async def test_a_canary_fits_into_a_small_worker(harness: CanaryHarness) -> None:
    worker = await harness.add_worker("decode-0", num_blocks=2)
    harness.send_canaries(RARELY_S)
    job = await job_of(worker)
    assert job.num_prompt_tokens == 30
    answer(worker, job, [9, 10])
    await harness.until_ready()


async def test_real_answers_are_proof_enough(harness: CanaryHarness) -> None:
    player = await harness.add_player("decode-0", 1)
    assert harness.reason
    assert ids_of(await harness.collect(request("r"))) == [9, 10]
    assert not harness.reason
    assert [job.request for job in player.seen] == ["r"]


async def test_one_token_proves_no_decoding(harness: CanaryHarness) -> None:
    worker = await harness.add_worker("decode-0")
    running = asyncio.create_task(harness.collect(request("r")))
    answer(worker, await job_of(worker), [9])
    await running
    assert harness.reason


async def test_a_canary_stays_with_its_worker_when_that_one_has_no_room(harness: CanaryHarness) -> None:
    await harness.add_player("decode-0", 1)
    full = await harness.add_worker("decode-1", 2, seats=1)
    await full.beat(num_running=1)
    harness.send_canaries(RARELY_S)
    await harness.until_ready()
    [target] = [target for target in list_targets(harness.roster) if target.source.worker == "decode-1"]
    await until(lambda: not harness.dispatcher.proofs.is_trusted(target.source), "doubted", DEADLINE_S)
    assert full.jobs.empty()
    assert len(harness.players[0].seen) == 1  # its own


async def test_a_canary_that_is_late_is_released_at_its_worker(harness: CanaryHarness) -> None:
    player = await harness.add_player("decode-0", 1, hangs=True)
    harness.send_canaries(RARELY_S)
    await until(lambda: player.seen)
    async with asyncio.timeout(DEADLINE_S):
        assert await player.worker.cancels.get() == (player.seen[0].request, 1)


async def test_a_restarted_worker_proves_itself_anew(harness: CanaryHarness) -> None:
    first = await harness.add_player("decode-0", 1)
    harness.send_canaries(RARELY_S)
    await harness.until_ready()
    await first.worker.stop()
    await until(lambda: harness.reason == "no decode worker is ready", lambda: harness.reason, DEADLINE_S)
    second = await harness.add_player("decode-0", 2, hangs=True)
    await until(lambda: second.seen, "tried", DEADLINE_S)
    assert "no canary has come back" in harness.reason
    answer(second.worker, second.seen[0], [9, 10])
    await harness.until_ready()


def request(name: str) -> GenerateRequest:
    return GenerateRequest(RequestId(name), MODEL, [5, 6, 7], SamplingParams(seed=1, max_tokens=8))
