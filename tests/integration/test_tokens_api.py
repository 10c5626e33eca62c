"""What a gateway tells beside answers: tokens, text of tokens, models, its version, and that it has no embeddings."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.broker.memory_limits import MemoryLimits
from common.messages.tenant import TenantLimits
from gateway.version import version
from tests.support.family_templates import HERMES
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.keyed_gateway import KeyCabinet, bearer, running_keyed_gateway
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import BOS, EOS, byte_level_tokenizer, id_of, tiny_card
from tests.support.tool_scenes import WEATHER

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER, add_bos=True, chat_template=HERMES, max_context=4096)
BOS_ID = id_of(TOKENIZER, BOS)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    engine = ScriptedEngine([CARD])
    engine.play([Stop()])
    async with running_gateway(engine) as running:
        yield running


async def tokenized(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, answer = await gateway.post("/tokenize", {"model": "tiny"} | fields)
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 4096
    return dict(answer)


async def test_the_tokens_of_a_text_are_those_of_its_completion(gateway: Gateway) -> None:
    answer = await tokenized(gateway, prompt="hello 日本")
    await gateway.complete(prompt="hello 日本")
    assert answer["tokens"] == list(gateway.engine.requests[-1].prompt_ids)
    assert answer["tokens"][0] == BOS_ID
    assert answer["token_strs"] is None
    bare = await tokenized(gateway, prompt="hello 日本", add_special_tokens=False)
    assert bare["tokens"] == answer["tokens"][1:]
    assert await tokenized(gateway, prompt="", add_special_tokens=False) == {
        "count": 0,
        "max_model_len": 4096,
        "tokens": [],
        "token_strs": None,
    }


async def test_the_tokens_of_a_conversation_are_those_of_its_chat(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Rain?"}]}]
    for fields in ({"messages": messages}, {"messages": messages, "tools": [WEATHER]}):
        answer = await tokenized(gateway, **fields, add_generation_prompt=True)
        await gateway.chat(**fields)
        assert answer["tokens"] == list(gateway.engine.requests[-1].prompt_ids)


async def test_names_are_those_of_the_vocabulary(gateway: Gateway) -> None:
    answer = await tokenized(gateway, prompt=f"é{EOS}", return_token_strs=True)
    assert answer["token_strs"] == [TOKENIZER.id_to_token(token_id) for token_id in answer["tokens"]]
    assert (answer["token_strs"][0], answer["token_strs"][-1]) == (BOS, EOS)


async def test_text_comes_back(gateway: Gateway) -> None:
    text = f"hello 日本\n{EOS}"
    ids = (await tokenized(gateway, prompt=text))["tokens"]
    assert await gateway.post("/detokenize", {"model": "tiny", "tokens": ids}) == (200, {"prompt": BOS + text})
    assert await gateway.post("/detokenize", {"model": "tiny", "tokens": []}) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * (4096 * 256 + 1)}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [WEATHER]}, 400, "tools"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [CARD.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": 5}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "model"),
        ("/v1/embeddings", {"input": ["a", "b"]}, 400, "model"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    gateway: Gateway, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    got, answer = await gateway.post(path, {"model": "tiny"} | fields)
    assert (got, answer["error"]["param"]) == (status, param)


async def test_the_official_client_is_told_that_a_model_makes_no_embeddings(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="'tiny' generates text; it makes no embeddings") as caught:
            await client.embeddings.create(model="tiny", input="a")
    assert (caught.value.code, caught.value.param) == ("model_not_embedding", "model")


async def test_models_and_version(gateway: Gateway) -> None:
    entry = {
        "id": "tiny",
        "object": "model",
        "created": CARD.created,
        "owned_by": "tandem",
        "max_model_len": 4096,
    }
    assert await gateway.get("/v1/models/tiny") == (200, entry)
    assert await gateway.get("/v1/models") == (200, {"object": "list", "data": [entry]})
    assert await gateway.get("/version") == (200, {"version": version()})
    status, answer = await gateway.get("/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_to_a_keys_limits_tokenising_is_a_request_without_tokens(tmp_path: Path) -> None:
    cabinet, limits = KeyCabinet(tmp_path), MemoryLimits()
    key = bearer(await cabinet.issue("key-a", TenantLimits(requests_per_minute=2, tokens_per_minute=5)))
    other = bearer(await cabinet.issue("key-b", models=("other",)))
    body = {"model": "tiny", "prompt": "far more tokens than five"}
    async with running_keyed_gateway(ScriptedEngine([CARD]), cabinet.entrance(limits)) as gateway:
        assert (await gateway.post("/tokenize", body))[0] == 401
        for path in ("/tokenize", "/detokenize", "/v1/embeddings"):
            status, answer = await gateway.post(path, body | {"tokens": [1], "input": "a"}, headers=other)
            assert (status, answer["error"]["code"]) == (403, "model_not_allowed")
        assert (await gateway.post("/v1/completions", body | {"max_tokens": 1}, headers=key))[0] == 429
        assert (await gateway.post("/tokenize", body, headers=key))[0] == 200
        assert (await gateway.post("/detokenize", body | {"tokens": [1]}, headers=key))[0] == 200
        status, answer = await gateway.post("/tokenize", body, headers=key)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
