"""`Generate` and `ListModels`: a client of gRPC gets what a client of HTTP gets, in gRPC's terms."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from common.broker.memory_limits import MemoryLimits
from common.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    GenerationFailed,
    Overloaded,
    RequestCancelled,
    WorkerLost,
)
from common.messages.logprobs import TokenLogprobs
from common.messages.tenant import TenantLimits
from gateway.engine import FinishReason, GenerateRequest, StageTimes
from proto.tandem.v1 import generate_pb2 as pb
from tests.support.gateway_server import text_of as http_text_of
from tests.support.keyed_gateway import KeyCabinet, bearer
from tests.support.rpc_gateway import RpcGateway, running_rpc_gateway, text_of, trailing_of
from tests.support.scripted_engine import Say, ScriptedEngine, Stop, Vanish
from tests.support.tiny_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
THINKER = tiny_card(TOKENIZER, chat_template=f"{CARD.chat_template}{{# <think> </think> #}}")

TEXT = {"model": "tiny", "text": "hello"}
CHAT = {"model": "tiny", "chat": {"messages": [{"role": "user", "content": "hi"}]}}


def asking(**fields: Any) -> pb.GenerateRequest:
    """Return a request, of a text unless the fields say otherwise."""
    has_prompt = {"token_ids", "chat"} & fields.keys()
    return ParseDict((({"model": "tiny"} if has_prompt else TEXT) | fields), pb.GenerateRequest())


@pytest.fixture
async def gateway() -> AsyncIterator[RpcGateway]:
    engine = ScriptedEngine([CARD])
    engine.play([*byte_ids(TOKENIZER, "hi é!"), Stop(num_cached=3)])
    async with running_rpc_gateway(engine) as running:
        yield running


async def test_a_text_is_continued(gateway: RpcGateway) -> None:
    answer = await gateway.generate(asking(text="hello"))
    assert [message.WhichOneof("event") for message in answer][-2:] == ["finished", "usage"]
    started, finished, usage = answer[0].started, answer[-2].finished, answer[-1].usage
    (request,) = gateway.engine.requests
    assert (started.id, started.model, started.num_prompt_tokens) == (request.request, "tiny", len(request.prompt_ids))
    assert text_of(answer) == "hi é!"
    assert (finished.choice, finished.reason) == (0, "stop")
    assert (usage.num_prompt_tokens, usage.num_generated_tokens) == (len(request.prompt_ids), 6)
    assert usage.num_cached_tokens == 3
    assert not usage.HasField("timing")


SAMPLING: dict[str, Any] = {
    "max_tokens": 20,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.05,
    "seed": -(2**62) - 1,
    "presence_penalty": -1.3,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stop": ["zz", "yy"],
    "stop_token_ids": [7, 3],
    "min_tokens": 2,
    "ignore_eos": True,
    "logit_bias": {5: -0.3, 9: 100.0},
}


def seen(request: GenerateRequest) -> dict[str, Any]:
    """Return what workers are told of a request, all but its name and its age."""
    names = ("model", "sampling", "cache_salt", "fingerprint", "num_choices", "tenant", "priority")
    return {"ids": list(request.prompt_ids)} | {name: getattr(request, name) for name in names}


@pytest.mark.parametrize(
    ("path", "http_prompt", "rpc_prompt"),
    [
        ("/v1/completions", {"prompt": "hello"}, {"text": "hello"}),
        ("/v1/completions", {"prompt": [1, 2, 200]}, {"token_ids": {"ids": [1, 2, 200]}}),
        ("/v1/chat/completions", {"messages": CHAT["chat"]["messages"]}, {"chat": CHAT["chat"]}),  # type: ignore[index]
    ],
)
@pytest.mark.parametrize("sampling", [{"seed": 1}, SAMPLING, {"seed": 0, "temperature": 0.0, "max_tokens": 1}])
async def test_both_ways_ask_the_workers_for_the_same(
    gateway: RpcGateway, path: str, http_prompt: dict[str, Any], rpc_prompt: dict[str, Any], sampling: dict[str, Any]
) -> None:
    more = {"cache_salt": "s", "priority": -3}
    http = {"model": "tiny", "n": 2, "stream": True} | http_prompt | sampling | more
    if path == "/v1/completions":
        http["logprobs"] = 5
    else:
        http |= {"logprobs": True, "top_logprobs": 5}
    gateway.engine.play([Say(0, tuple(byte_ids(TOKENIZER, "ab"))), Say(1, tuple(byte_ids(TOKENIZER, "cd")))])
    gateway.engine.scripts[0] += [Stop(choice=0), Stop(choice=1)]
    events = await gateway.http.events(path, http | {"stream_options": {"include_usage": True}})
    answer = await gateway.generate(
        asking(**rpc_prompt, **more, sampling=sampling, num_choices=2, num_logprobs=5, wants_text=True)
    )
    first, second = gateway.engine.requests
    assert seen(first) == seen(second)
    assert len({first.request, second.request}) == 2
    assert text_of(answer, 0) + text_of(answer, 1) == http_text_of(events)
    usage = answer[-1].usage
    counts = events[-2]["usage"]
    assert (usage.num_prompt_tokens, usage.num_generated_tokens) == (
        counts["prompt_tokens"],
        counts["completion_tokens"],
    )


async def test_choices_with_logprobs_and_ids(gateway: RpcGateway) -> None:
    impossible = TokenLogprobs(-math.inf, ((65, -0.5), (66, -math.inf)))
    gateway.engine.play([Say(1, (71,)), Say(0, (65, 66), (impossible, impossible)), Stop(choice=1), 67, Stop()])
    wants = {"wants_token_ids": True, "wants_text": True, "num_choices": 2, "num_logprobs": 2}
    answer = await gateway.generate(asking(**wants))
    deltas = [message.delta for message in answer if message.HasField("delta")]
    ids = {choice: [i for d in deltas if d.choice == choice for i in d.token_ids] for choice in (0, 1)}
    assert ids == {0: [65, 66, 67], 1: [71]}
    logprobs = [entry for delta in deltas if delta.choice == 0 for entry in delta.logprobs]
    assert [entry.token_id for entry in logprobs] == [65, 66, 67]
    assert [entry.logprob for entry in logprobs[:2]] == [-9999.0, -9999.0]
    assert [(top.token_id, top.token, top.logprob) for top in logprobs[0].top] == [
        (65, text_of(answer)[0], -0.5),
        (66, text_of(answer)[1], -9999.0),
    ]
    finished = {message.finished.choice: message.finished.reason for message in answer if message.HasField("finished")}
    assert finished == {0: "stop", 1: "stop"}
    assert answer[-1].usage.num_generated_tokens == 4


@pytest.mark.parametrize(
    ("wants", "has_text", "has_ids"),
    [
        ({}, True, False),
        ({"wants_text": True}, True, False),
        ({"wants_token_ids": True}, False, True),
        ({"wants_text": True, "wants_token_ids": True}, True, True),
    ],
)
async def test_deltas_carry_what_is_wanted(
    gateway: RpcGateway, wants: dict[str, bool], has_text: bool, has_ids: bool
) -> None:
    answer = await gateway.generate(asking(**wants))
    ids = [token_id for message in answer for token_id in message.delta.token_ids]
    assert text_of(answer) == ("hi é!" if has_text else "")
    assert ids == (byte_ids(TOKENIZER, "hi é!") if has_ids else [])


async def test_stops_end_a_choice_alone(gateway: RpcGateway) -> None:
    gateway.engine.play([Say(0, tuple(byte_ids(TOKENIZER, "abSTOPcd"))), Say(1, (id_of(TOKENIZER, EOS),))])
    gateway.engine.scripts[0] += [Stop(FinishReason.LENGTH, choice=1)]
    answer = await gateway.generate(asking(num_choices=2, sampling={"stop": ["STOP"]}))
    assert text_of(answer) == "ab"
    assert [message.finished.reason for message in answer if message.HasField("finished")] == ["stop", "stop"]
    assert [choice for _, choice in gateway.engine.ended] == [0]


async def test_thoughts_are_told_apart() -> None:
    engine = ScriptedEngine([THINKER])
    engine.play([*byte_ids(TOKENIZER, "<think>why</think>because"), Stop()])
    async with running_rpc_gateway(engine) as gateway:
        answer = await gateway.generate(asking(chat=CHAT["chat"]))
    assert "".join(message.delta.reasoning for message in answer) == "why"
    assert text_of(answer) == "because"


async def test_timing_is_told_if_it_is_wanted(gateway: RpcGateway) -> None:
    gateway.engine.play([65, Stop(times=StageTimes(queue_s=0.5, decode_s=1.5))])
    timing = (await gateway.generate(asking(includes_timing=True)))[-1].usage.timing
    assert (timing.queue_s, timing.decode_s) == (0.5, 1.5)
    assert 0 < timing.ttft_s < timing.total_s
    assert timing.admission_s > 0


async def test_grammars_reach_the_workers(gateway: RpcGateway) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    await gateway.generate(asking(sampling={"json_schema": schema, "max_tokens": 9}))
    await gateway.generate(asking(chat=CHAT["chat"], sampling={"regex": "[ab]+", "max_tokens": 9}))
    by_schema, by_regex = (request.sampling.grammar for request in gateway.engine.requests)
    assert by_schema is not None
    assert "properties" in by_schema
    assert by_regex is not None
    assert "[ab]+" in by_regex


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"temperature": 2.5}}, "sampling.temperature"),
        ({"sampling": {"temperature": "NaN"}}, "sampling.temperature"),
        ({"sampling": {"top_p": "Infinity"}}, "sampling.top_p"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
        ({"sampling": {"top_k": -2}}, "sampling.top_k"),
        ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": "NaN"}}, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 4_000_000_000}}, "prompt"),
        ({"sampling": {"min_tokens": 21, "max_tokens": 20}}, "sampling.min_tokens"),
        ({"sampling": {"stop": ["a"] * 5}}, "sampling.stop"),
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
        ({"sampling": {"stop_token_ids": [99_999]}}, "sampling.stop_token_ids"),
        ({"sampling": {"logit_bias": {1: "NaN"}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {1: 101.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {99_999: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias"),
        ({"sampling": {"json_schema": ""}}, "sampling.json_schema"),
        ({"sampling": {"json_schema": "{"}}, "sampling.json_schema"),
        ({"sampling": {"regex": "["}}, "sampling.regex"),
        ({"sampling": {"regex": ""}}, "sampling.regex"),
        ({"num_choices": 129}, "num_choices"),
        ({"num_choices": 4_000_000_000}, "num_choices"),
        ({"num_logprobs": 21}, "num_logprobs"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"text": ""}, "prompt"),
        ({"token_ids": {"ids": []}}, "prompt"),
        ({"token_ids": {"ids": [99_999]}}, "prompt"),
        ({"token_ids": {"ids": [2**32 - 1]}}, "prompt"),
        ({"token_ids": {"ids": [1] * 64}}, "prompt"),
        ({"chat": {"messages": []}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "robot", "content": "x"}]}}, "chat.messages[0].role"),
        ({"chat": {"messages": [{"role": "tool", "content": "x"}]}}, "chat.messages[0].tool_call_id"),
    ],
)
async def test_what_is_wrong_is_named(gateway: RpcGateway, fields: dict[str, Any], param: str) -> None:
    code, trailing = await gateway.refused(asking(**fields))
    assert (code, trailing.get("tandem-error-param")) == (grpc.StatusCode.INVALID_ARGUMENT, param), trailing
    assert "retry-after" not in trailing
    assert gateway.engine.requests == []
    assert text_of(await gateway.generate(asking())) == "hi é!"


async def test_messages_call_fields_by_their_names_here(gateway: RpcGateway) -> None:
    _, trailing = await gateway.refused(asking(num_choices=129))
    assert "`num_choices`" in trailing["details"]
    _, trailing = await gateway.refused(asking(sampling={"json_schema": "{"}))
    assert "`sampling.json_schema`" in trailing["details"]


async def test_a_request_without_a_prompt_is_refused(gateway: RpcGateway) -> None:
    code, trailing = await gateway.refused(pb.GenerateRequest(model="tiny"))
    assert (code, trailing["tandem-error-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


async def test_an_unknown_model_is_not_found(gateway: RpcGateway) -> None:
    code, trailing = await gateway.refused(asking(model="other"))
    assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.NOT_FOUND, "model_not_found")
    assert trailing["tandem-error-param"] == "model"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (WorkerLost("gone"), grpc.StatusCode.UNAVAILABLE, "worker_lost"),
        (Overloaded("full", retry_after_s=7.2), grpc.StatusCode.UNAVAILABLE, "overloaded"),
        (BrokerUnavailable("away"), grpc.StatusCode.UNAVAILABLE, "unavailable"),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded"),
        (RequestCancelled("asked"), grpc.StatusCode.CANCELLED, "request_cancelled"),
        (GenerationFailed("odd"), grpc.StatusCode.INTERNAL, "generation_failed"),
        (ValueError("a secret of ours"), grpc.StatusCode.INTERNAL, "internal_error"),
    ],
)
async def test_a_failure_ends_the_call_behind_what_came_before_it(
    gateway: RpcGateway, failure: Exception, status: grpc.StatusCode, code: str
) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), failure])
    answer: list[pb.GenerateResponse] = []
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await gateway.read_into(answer, gateway.stub.Generate(asking()))
    assert text_of(answer) == "ab"
    trailing = trailing_of(failed.value)
    assert (failed.value.code(), trailing["tandem-error-code"]) == (status, code)
    assert "secret" not in trailing["details"]
    assert ("retry-after" in trailing) == (status is grpc.StatusCode.UNAVAILABLE)
    if isinstance(failure, Overloaded):
        assert trailing["retry-after"] == "8"
    await gateway.engine.until_running(0)


async def test_an_answer_without_an_end_is_an_error(gateway: RpcGateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "ab"), Vanish()])
    code, trailing = await gateway.refused(asking())
    assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.INTERNAL, "generation_failed")


@pytest.mark.parametrize(("sent", "is_kept"), [("my-id.1", True), ("bad id", False), ("x" * 129, False), (None, False)])
async def test_an_id_of_the_client_comes_back(gateway: RpcGateway, sent: str | None, is_kept: bool) -> None:
    call = gateway.stub.Generate(asking(), metadata=() if sent is None else (("x-request-id", sent),))
    answer = [message async for message in call]
    own = dict(await call.initial_metadata())["x-request-id"]
    assert own == (sent if is_kept else answer[0].started.id)


async def test_models_are_listed(gateway: RpcGateway) -> None:
    listed = await gateway.stub.ListModels(pb.ListModelsRequest())
    (model,) = listed.models
    assert (model.id, model.created, model.max_context) == ("tiny", CARD.created, 64)
    assert model.vocab_size == CARD.vocab_size


async def test_limits_of_a_key_count_for_both_ways(tmp_path: Path) -> None:
    cabinet = KeyCabinet(tmp_path)
    key = await cabinet.issue("a", TenantLimits(requests_per_minute=2), models=("tiny",))
    engine = ScriptedEngine([CARD, tiny_card(TOKENIZER, model="other")])
    engine.play([65, Stop()])
    sent = (("authorization", f"Bearer {key}"),)
    async with running_rpc_gateway(engine, cabinet.entrance(MemoryLimits())) as gateway:
        listed = await gateway.stub.ListModels(pb.ListModelsRequest(), metadata=sent)
        assert [model.id for model in listed.models] == ["tiny"]
        status, _ = await gateway.http.post("/v1/completions", {"model": "tiny", "prompt": "x"}, headers=bearer(key))
        assert status == 200
        await gateway.generate(asking(), metadata=sent)
        code, trailing = await gateway.refused(asking(), metadata=sent)
        assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded")
        assert int(trailing["retry-after"]) > 0
        code, trailing = await gateway.refused(asking(model="other"), metadata=sent)
        assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.PERMISSION_DENIED, "model_not_allowed")
        code, trailing = await gateway.refused(asking(priority=1), metadata=sent)
        assert (code, trailing["tandem-error-param"]) == (grpc.StatusCode.PERMISSION_DENIED, "priority")
        code, trailing = await gateway.refused(asking())
        assert (code, trailing["tandem-error-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "missing_api_key")
    assert {request.tenant for request in engine.requests} == {"a"}
    assert gateway.service.entrance.tenants is not None
    await gateway.service.entrance.tenants.close()
    assert gateway.service.entrance.tenants.num_held == 0
