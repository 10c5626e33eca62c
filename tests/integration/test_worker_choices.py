"""Requests with several choices on whole workers: prefilled here or elsewhere, cancelled in part, failed, moved."""

import math
from collections.abc import AsyncIterator

import pytest

from common.broker.protocols import QueuedJob
from common.messages.ids import EntryId, Epoch
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_message, logprobs_of
from common.scheduling.plan import StepPlan, StepResult
from common.telemetry.traces import Attribute, Stage
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from proto import worker_pb2 as pb
from tests.support.feed_client import Answer, FeedClient, make_choices, make_job
from tests.support.likelihoods import likelihood
from tests.support.polling import until
from tests.support.scripted_prefill import ScriptedPrefill, binding_of
from tests.support.span_exporter import span_exporter
from tests.support.tagged_pages import TaggedRunner, answer
from tests.support.worker_fabric import SECRET, Fabric, Node, puller, running_fabric

PROMPT = list(range(300, 330))
"""Seven full blocks, and half of one."""

Pair = tuple[Node[DecodeWorker], Node[PrefillWorker], FeedClient]


@pytest.fixture
async def fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    async with running_fabric(monkeypatch) as fabric:
        yield fabric


@pytest.fixture
async def pair(fabric: Fabric) -> AsyncIterator[Pair]:
    pair = await fabric.pair()
    yield pair
    await fabric.until_idle()


@pytest.fixture
async def decode(fabric: Fabric) -> AsyncIterator[Node[DecodeWorker]]:
    decode = await fabric.decode()
    yield decode
    await fabric.until_idle()


def expected(count: int, max_tokens: int = 5, prompt: list[int] = PROMPT) -> dict[int, Answer]:
    return {choice: Answer(answer(prompt, max_tokens, choice=choice), "length") for choice in range(count)}


def fresh(count: int) -> dict[int, list[int]]:
    return {choice: [] for choice in range(count)}


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 30])
async def test_here(fabric: Fabric, decode: Node[DecodeWorker], num_tokens: int) -> None:
    client = await fabric.client(decode.record)
    prompt = PROMPT[:num_tokens]
    await client.place(make_choices("r", prompt, fresh(3)), decode.record)
    assert await client.answers("r", 3) == expected(3, prompt=prompt)
    assert sum(length for _, length in decode.valve.computed("r")) == num_tokens + 2 + 3 * 4


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 30])
async def test_prefilled_elsewhere(pair: Pair, num_tokens: int) -> None:
    decode, prefill, client = pair
    prompt = PROMPT[:num_tokens]
    await client.place(make_choices("r", prompt, fresh(3)), decode.record)
    assert await client.answers("r", 3) == expected(3, prompt=prompt)
    assert sum(length for _, length in prefill.valve.computed("r")) == num_tokens
    assert sum(length for _, length in decode.valve.computed("r")) == 2 + 3 * 4
    assert client.early_tokens("r") == answer(prompt, 1)


@pytest.mark.parametrize("num_tokens", [28, 29])
async def test_b063_a_prompt_that_is_cached_whole(pair: Pair, num_tokens: int) -> None:
    decode, _, client = pair
    prompt = PROMPT[:num_tokens]
    for name in ("first", "second"):
        await client.place(make_choices(name, prompt, fresh(2)), decode.record)
        got = await client.answers(name, 2)
        assert {choice: each.tokens for choice, each in got.items()} == {
            choice: answer(prompt, 5, choice=choice) for choice in range(2)
        }


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_b051_one_token_of_each(fabric: Fabric, where: str) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    if where == "elsewhere":
        prefill = await fabric.prefill()
        await client.follow(prefill.record)
        await fabric.know(decode, prefill)
    await client.place(make_choices("r", PROMPT, fresh(3), max_tokens=1), decode.record)
    assert await client.answers("r", 3) == expected(3, 1)
    await fabric.until_idle()


async def test_b051_a_first_token_that_stops_waits_for_pages_that_others_need(pair: Pair) -> None:
    decode, _, client = pair
    (first,) = answer(PROMPT, 1)
    puller(decode).gate.clear()
    await client.place(make_choices("r", PROMPT, fresh(2), stop_ids=(first,)), decode.record)
    await until(lambda: client.early_tokens("r"), "the first token is sampled")
    ((_, attempt),) = decode.worker._receiver.attempts()
    await until(lambda: attempt.commit is not None, "it is committed")
    is_won = attempt.outcome.done()
    puller(decode).gate.set()
    assert not is_won
    got = await client.answers("r", 2)
    assert got[0] == Answer([first], "stop")
    assert got[1].tokens == answer(PROMPT, 5, (first,), choice=1)


async def test_a_failover_goes_on_with_the_choices_that_are_open(pair: Pair) -> None:
    decode, _, client = pair
    whole = {choice: answer(PROMPT, 8, choice=choice) for choice in (1, 2, 4)}
    shown = {1: whole[1][:3], 2: [], 4: whole[4][:6]}
    await client.place(make_choices("r", PROMPT, shown, placement=2, max_tokens=8), decode.record)
    got = await client.answers("r", 3, 2)
    assert {choice: each.tokens for choice, each in got.items()} == {
        choice: whole[choice][len(shown[choice]) :] for choice in whole
    }
    assert client.early_tokens("r", 2) == whole[1][3:4]


async def test_each_choice_is_told_apart(fabric: Fabric, decode: Node[DecodeWorker]) -> None:
    client = await fabric.client(decode.record)
    await client.place(make_choices("r", PROMPT, {2: [], 5: []}), decode.record)
    assert set(await client.answers("r", 2)) == {2, 5}


async def test_a_cancel_ends_all_choices(fabric: Fabric, decode: Node[DecodeWorker]) -> None:
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_choices("r", PROMPT, fresh(3), max_tokens=90), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    decode.valve.let(6)  # four steps compute the prompt
    await until(lambda: decode.edge.load.num_running == 3, "all of them run")
    await client.cancel(decode.record, "r")
    decode.valve.open()
    await fabric.until_idle()
    assert "finished" not in client.kinds("r")
    assert len(decode.valve.computed("r")) < 20


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "prompt", "running"])
async def test_a_choice_is_cancelled_alone(fabric: Fabric, decode: Node[DecodeWorker], victim: int, when: str) -> None:
    client = await fabric.client(decode.record)
    decode.valve.close()
    if when == "before":  # the job is under way
        await client.cancel(decode.record, "r", choice=victim)
    await client.place(make_choices("r", PROMPT, fresh(3)), decode.record)
    await until(lambda: decode.valve.is_holding, "its prompt is about to be computed")
    if when == "running":
        decode.valve.let(6)
        await until(lambda: decode.edge.load.num_running == 3, "all of them run")
    if when != "before":
        await client.cancel(decode.record, "r", choice=victim)
    decode.valve.open()
    wanted = expected(3)
    del wanted[victim]
    assert await client.answers("r", 2) == wanted


async def test_the_last_choice_that_is_cancelled_ends_the_placement(fabric: Fabric, decode: Node[DecodeWorker]) -> None:
    client = await fabric.client(decode.record)
    decode.valve.close()
    await client.place(make_choices("r", PROMPT, fresh(2)), decode.record)
    await until(lambda: decode.valve.is_holding, "it runs")
    for choice in (1, 0, 1):
        await client.cancel(decode.record, "r", choice=choice)
    assert not len(decode.worker._ledger)
    decode.valve.open()
    await fabric.until_idle()


async def test_choices_that_were_all_cancelled_before_their_job_came(
    fabric: Fabric, decode: Node[DecodeWorker]
) -> None:
    client = await fabric.client(decode.record)
    for choice in (0, 1):
        await client.cancel(decode.record, "r", choice=choice)
    await client.place(make_choices("r", PROMPT, fresh(2)), decode.record)
    await client.place(make_job("next", PROMPT), decode.record)
    assert (await client.answer("next")).tokens == answer(PROMPT, 5)
    assert not client.kinds("r")


@pytest.mark.parametrize("when", ["computed", "pulled"])
async def test_the_choice_that_leads_is_cancelled_while_it_is_received(
    pair: Pair, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill, client = pair
    exporter = span_exporter(monkeypatch)
    (prefill.valve.close if when == "computed" else puller(decode).gate.clear)()
    await client.place(make_choices("r", PROMPT, fresh(3)), decode.record)
    if when == "computed":
        await until(lambda: prefill.valve.is_holding, "the prompt is about to be computed")
    else:
        await until(lambda: client.early_tokens("r"), "the first token is sampled")
    await client.cancel(decode.record, "r", choice=0)
    assert not decode.worker._receiver.attempts()
    (prefill.valve.open if when == "computed" else puller(decode).gate.set)()
    wanted = expected(3)
    del wanted[0]
    assert await client.answers("r", 2) == wanted
    await until(lambda: not len(decode.worker._ledger), "its stages are recorded")
    spans = [(span.name, (span.attributes or {})[Attribute.WORKER]) for span in exporter.get_finished_spans()]
    here = [name for name, worker in spans if worker == decode.record.worker]
    assert [stage for stage in here if stage != Stage.TRANSFER] == [Stage.PREFILL, Stage.DECODE]


async def test_a_follower_is_cancelled_while_the_leader_is_received(pair: Pair) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    await client.place(make_choices("r", PROMPT, fresh(2), max_tokens=1), decode.record)
    await until(lambda: prefill.valve.is_holding, "the prompt is about to be computed")
    await client.cancel(decode.record, "r", choice=1)
    prefill.valve.open()
    assert await client.answers("r", 1) == expected(1, 1)


async def test_a_prefill_worker_that_dies_takes_no_choice_along(fabric: Fabric) -> None:
    decode, prefill, client = await fabric.pair()
    prefill.valve.close()
    await client.place(make_choices("r", PROMPT, fresh(3)), decode.record)
    await until(lambda: prefill.valve.is_holding, "the prompt is about to be computed")
    await prefill.kill()
    await fabric.broker.registry.leave(prefill.record.worker, prefill.record.epoch)
    decode.worker._leases.probe()
    assert await client.answers("r", 3) == expected(3)
    await until(lambda: decode.edge.load.blocks_free == decode.edge.load.blocks_total, "idle")


async def test_one_bad_choice_fails_the_placement(
    fabric: Fabric, decode: Node[DecodeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TaggedRunner.run

    def violate(self: TaggedRunner, plan: StepPlan) -> StepResult:
        result = run(self, plan)
        bad = frozenset(key for key in result.tokens if key.choice == 1)
        return StepResult({key: token for key, token in result.tokens.items() if key not in bad}, violated=bad)

    monkeypatch.setattr(TaggedRunner, "run", violate)
    client = await fabric.client(decode.record)
    await client.place(make_choices("r", PROMPT, fresh(3), max_tokens=40), decode.record)
    got = await client.answers("r", 3)
    assert got[0].reason == "grammar_violated"
    assert not client.events["r", 1][-1].failed.is_retryable
    await until(lambda: not len(decode.worker._ledger), "it is over")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_logprobs_of_each_token_and_of_the_prompt(fabric: Fabric, where: str) -> None:
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    if where == "elsewhere":
        prefill = await fabric.prefill()
        await client.follow(prefill.record)
        await fabric.know(decode, prefill)
    for name in ("first", "again"):  # what is cached has no logits
        job = make_choices(name, PROMPT, fresh(2), num_logprobs=1, num_prompt_logprobs=1)
        await client.place(job, decode.record)
        assert (await client.answers(name, 2)).keys() == {0, 1}
        frames = [event.tokens for event in client.events[name, 1] if event.WhichOneof("event") == "tokens"]
        assert not any(frame.is_early for frame in frames)
        assert [list(map(logprobs_of, frame.logprobs)) for frame in frames] == [
            [likelihood(token) for token in frame.ids] for frame in frames
        ]
        of_prompt = [list(map(logprobs_of, frame.prompt_logprobs)) for frame in frames]
        assert of_prompt == [list(map(likelihood, PROMPT[1:])), *[[]] * (len(frames) - 1)]
        assert frames[0].choice == 0
    await fabric.until_idle()


@pytest.mark.parametrize("lack", ["first token", "prompt", "malformed", "no number"])
async def test_a_commit_without_the_logprobs_loses_the_try(fabric: Fabric, lack: str) -> None:
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    job = make_choices("r", PROMPT, fresh(2), num_logprobs=0, num_prompt_logprobs=0)
    await client.place(job, decode.record)
    binding = binding_of((await prefill.claim()).task)
    await prefill.bind(decode.record, binding)
    of_prompt = [logprobs_message(TokenLogprobs(0.0))] * (len(PROMPT) - (2 if lack == "prompt" else 1))
    if lack == "malformed":
        of_prompt[0] = pb.TokenLogprobs(top_ids=[1])
    if lack == "no number":
        of_prompt[0] = pb.TokenLogprobs(logprob=math.nan)
    commit = pb.CommitRequest(
        binding=binding,
        epoch=Epoch(prefill.record.epoch),
        token=1,
        logprobs=None if lack == "first token" else pb.TokenLogprobs(),
        prompt_logprobs=of_prompt,
    )
    await prefill._stub(decode.record).Commit(commit, timeout=5)
    again = (await prefill.claim()).task
    assert again.try_number == 2
    assert "try_lost" not in client.kinds("r")
    await client.cancel(decode.record, "r")
    await fabric.until_idle()
    await prefill.stop()


async def test_a_prefill_that_violates_the_grammar_fails_the_request(fabric: Fabric) -> None:
    prefill = ScriptedPrefill(fabric.broker, fabric.transfer, SECRET)
    await prefill.start()
    decode = await fabric.decode()
    client = await fabric.client(decode.record)
    await until(lambda: decode.edge.peers.find(prefill.record.worker, prefill.record.epoch), "they know each other")
    await client.place(make_choices("r", PROMPT, fresh(2)), decode.record)
    binding = binding_of((await prefill.claim()).task)
    await prefill.bind(decode.record, binding)
    await prefill.commit(decode.record, binding, failure="grammar_violated")
    await until(lambda: client.kinds("r")[-1:] == ["failed"], "it has failed")
    assert client.kinds("r") == ["accepted", "failed"]
    assert client.events["r", 1][-1].failed.code == "grammar_violated"
    assert not decode.valve.spans
    await fabric.until_idle()
    await prefill.stop()


async def test_where_the_time_went(pair: Pair) -> None:
    decode, prefill, client = pair
    prefill.valve.close()
    await client.place(make_choices("r", PROMPT, fresh(2)), decode.record)
    await until(lambda: prefill.valve.is_holding, "the prompt is about to be computed")
    prefill.valve.open()
    await client.answers("r", 2)
    times = [event.finished.times for event in client.events["r", 1] if event.WhichOneof("event") == "finished"]
    assert len(times) == 2
    for each in times:
        assert each.wait_s >= 0
        assert each.prefill_s > 0
        assert 0 < each.transfer_s <= each.prefill_s
        assert each.decode_s > 0


async def test_choices_that_can_never_have_seats_are_refused_with_both_numbers(fabric: Fabric) -> None:
    decode = await fabric.decode(max_sequences=2)
    client = await fabric.client(decode.record)
    job = make_choices("r", PROMPT, fresh(3))
    decode.worker._intake.accept(QueuedJob(EntryId("1-0"), job))  # no broker would place it here
    await until(lambda: client.kinds("r"), "refused")
    failed = client.events["r", 1][-1].failed
    assert (failed.code, "3 choices exceed the 2" in failed.message) == ("invalid_request", True)


async def test_choices_that_can_never_have_pages_are_refused_with_both_numbers(fabric: Fabric) -> None:
    decode = await fabric.decode(num_blocks=9)
    client = await fabric.client(decode.record)
    await client.place(make_choices("r", PROMPT, fresh(3)), decode.record)
    await until(lambda: client.kinds("r")[-1:] == ["failed"], "refused")
    failed = client.events["r", 1][-1].failed
    assert (failed.code, "40 tokens exceed the 36" in failed.message) == ("too_long", True)
    await client.place(make_choices("next", PROMPT, fresh(2)), decode.record)
    got = await client.answers("next", 2)
    assert got == expected(2)
