"""What clients of such systems ask for and this one does not have: refused visibly before anything is generated."""

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from proto.tandem.v1 import generate_pb2 as pb
from tests.support.gateway_server import Gateway, chat_body, running_gateway
from tests.support.rpc_gateway import running_rpc_gateway, text_of
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([CARD])) as running:
        yield running


SHARED: list[dict[str, Any]] = [
    {"use_beam_search": True},
    {"length_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"truncate_prompt_tokens": 5},
    {"add_special_tokens": False},
]
CHAT_CASES: list[dict[str, Any]] = [
    *SHARED,
    {"best_of": 2},
    {"echo": True},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}},
    {"web_search_options": {}},
    {"continue_final_message": True},
]
TEXT_CASES: list[dict[str, Any]] = [
    *SHARED,
    {"suffix": "x"},
    {"prompt_embeds": "x"},
    {"top_logprobs": 1},
    {"chat_template_kwargs": {"enable_thinking": True}},
]


@pytest.mark.parametrize("fields", CHAT_CASES)
async def test_a_chat_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    [param] = fields
    status, answer = await gateway.post(CHAT, chat_body(**fields))
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")
    assert gateway.engine.requests == []


@pytest.mark.parametrize("fields", TEXT_CASES)
async def test_a_completion_that_would_need_it_is_refused(gateway: Gateway, fields: dict[str, Any]) -> None:
    [param] = fields
    status, answer = await gateway.post(TEXT, {"model": "tiny", "prompt": "hello"} | fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.engine.requests == []


def tensor(**fields: object) -> bytes:
    """Return a body of KServe's v2 protocol with one tensor."""
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]} | fields]}
    ).encode()


HEAD = "Inference-Header-Content-Length"
BINARY = tensor(datatype="BYTES", shape=[1], parameters={"binary_data_size": 8}) + b"\xff\xff\xff\x7fabcd"
INFER = "/v2/models/tiny/infer"
KSERVE: list[tuple[str, str, bytes, dict[str, str]]] = [
    ("shape as text", INFER, tensor(shape="-1"), {}),
    ("negative shape", INFER, tensor(shape=[-1, 4]), {}),
    ("shape of another size", INFER, tensor(shape=[2, 2]), {}),
    ("huge shape", INFER, tensor(shape=[10**12]), {}),
    ("unknown datatype", INFER, tensor(datatype="FP7"), {}),
    ("name twice", INFER, b'{"inputs": [{"name": "x"}, {"name": "x"}]}', {}),
    ("length behind the end", INFER, BINARY, {HEAD: str(len(BINARY) - 8)}),
    ("no length", INFER, BINARY, {}),
    ("negative length", INFER, BINARY, {HEAD: "-1"}),
    ("length above the body", INFER, BINARY, {HEAD: str(2**31)}),
    ("length that is no number", INFER, BINARY, {HEAD: "many"}),
    ("another size of the data", INFER, BINARY + b"more", {HEAD: str(len(BINARY) - 8)}),
    ("unknown model", "/v2/models/other/infer", tensor(), {}),
    ("unknown version", "/v2/models/tiny/versions/7/infer", tensor(), {}),
    ("long", INFER, tensor(data=[0.5] * 1_250_000), {}),
    ("no JSON", INFER, b"\x00" * 1000, {}),
]


@pytest.mark.parametrize(("path", "body", "headers"), [case[1:] for case in KSERVE], ids=[case[0] for case in KSERVE])
async def test_b034_whatever_comes_in_a_protocol_that_is_not_spoken_is_404_and_harms_nobody(
    gateway: Gateway, path: str, body: bytes, headers: dict[str, str]
) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    for _ in range(2):  # the connection is good for another one, or is made anew
        async with gateway.session.post(gateway.url + path, data=io.BytesIO(body), headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"], error["code"]) == (404, "invalid_request_error", "not_found")
    for state in ("live", "ready"):
        assert (await gateway.get(f"/health/{state}"))[0] == 200
        assert (await gateway.get(f"/v2/health/{state}"))[0] == 404
    assert gateway.engine.requests == []
    status, answer = await gateway.post(TEXT, {"model": "tiny", "prompt": "hello"})
    assert (status, answer["choices"][0]["text"]) == (200, "hi")


async def test_b034_a_body_that_claims_gigabytes_is_not_waited_for(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with gateway.connection() as (reader, writer):
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2**31 + 1}\r\n"
        writer.write(f"{head}\r\n".encode() + tensor())
        assert (await reader.readline()).split()[1] in (b"404", b"413")
    status, answer = await gateway.post(TEXT, {"model": "tiny", "prompt": "hello"})
    assert (status, answer["choices"][0]["text"]) == (200, "hi")


async def test_b034_grpc_knows_no_such_service_and_serves_on() -> None:
    engine = ScriptedEngine([CARD])
    engine.play([*byte_ids(TOKENIZER, "hi"), Stop()])
    async with running_rpc_gateway(engine) as gateway:
        for method in ("ModelInfer", "ModelReady", "ServerLive"):
            call: Any = gateway.channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}", request_serializer=bytes
            )
            for message in (b"", b"\x0a\x04tiny", b"\xff" * 1000):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(message)
                assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert text_of(await gateway.generate(pb.GenerateRequest(model="tiny", text="hello"))) == "hi"
