"""The client of fault tests and soak: it takes what has the form of an answer or of an error, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.exchange import Answer, Exchange, Hanging, Refusal
from tests.support.fault_client import asking, completion
from tests.support.gateway_server import Gateway, running_gateway
from tests.support.polling import until
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card

TOKENIZER = byte_level_tokenizer()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedEngine([tiny_card(TOKENIZER, max_context=1024, vocab_size=512)])) as running:
        yield running


def asked(gateway: Gateway, **fields: Any) -> Exchange:
    return asking(gateway.url, completion(1, 20, **fields)).start()


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer(gateway: Gateway, streams: bool) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a b c"), Stop()])
    exchange = asked(gateway, stream=streams)
    answer = await exchange.over()
    num_tokens = len(byte_ids(TOKENIZER, "a b c"))
    assert answer == Answer("a b c", "stop", num_tokens, 20)
    assert exchange.is_over
    assert len(exchange.request) == 32
    assert exchange.salt == gateway.engine.requests[0].cache_salt != ""
    assert exchange.times
    assert exchange.silence_after(exchange.times[0] - 1) >= 1


async def test_a_refusal(gateway: Gateway) -> None:
    assert await asked(gateway, max_tokens=10_000).over() == Refusal(400, "context_length_exceeded")


async def test_a_client_that_is_left_hanging_says_so(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a b"), Silence()])
    exchange = asked(gateway, stream=True)
    await exchange.has_tokens(1)
    assert await exchange.has(exchange.has_text)
    assert not exchange.is_over
    with pytest.raises(Hanging, match="neither an end nor an error within"):
        await exchange.over(0.05)
    await gateway.engine.until_running(0)  # it has hung up


async def test_a_client_that_hangs_up(gateway: Gateway) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a b"), Silence()])
    exchange = asked(gateway, stream=True)
    await exchange.has_tokens(1)
    exchange.hang_up()
    await until(lambda: exchange.is_over, "it is over")
    await gateway.engine.until_running(0)
    assert exchange.text == "a b"


async def test_a_gateway_that_is_gone(gateway: Gateway) -> None:
    exchange = asking("http://127.0.0.1:1", completion(1, 20)).start()
    async with asyncio.timeout(20):
        refusal = await exchange.over()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.is_clean) == (0, False)
