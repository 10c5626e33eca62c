"""Grammars compiled by real processes: shared, remembered, and ended when they will not end."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from common.errors import InvalidGrammar, Overloaded, Unavailable
from gateway.guidance import compiler, grammars
from gateway.guidance.compiler import Compiler
from gateway.guidance.grammars import Grammars
from gateway.guidance.source import Choice, JsonSchema, Regex, Source
from tests.support.cluster import is_alive
from tests.support.polling import until
from tests.support.source_tree import ROOT
from tests.support.tiny_tokenizer import byte_level_tokenizer, sentencepiece_tokenizer, tiny_card

CARD = tiny_card(byte_level_tokenizer())
OTHER_CARD = tiny_card(sentencepiece_tokenizer())
LIMIT_S = 1.0
ENDLESS = JsonSchema('{"type": "integer", "multipleOf": 123456789}')
DEEP = JsonSchema(
    json.dumps(
        {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(3000)} | {"3000": {}}}
    )
)


@pytest.fixture
async def compilers() -> AsyncIterator[Grammars]:
    compilers = Grammars(num_compilers=2, limit_s=LIMIT_S)
    yield compilers
    await compilers.close()
    assert not children()


def children() -> list[psutil.Process]:
    """Return the compiler processes of this process."""
    return [process for process in psutil.Process().children(recursive=True) if compiler.PROGRAM in command_of(process)]


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process, nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none either
        return process.cmdline()
    return []


def lark_of(grammar: str) -> str:
    (only,) = json.loads(grammar)["grammars"]
    text: str = only["lark_grammar"]
    return text


async def test_a_grammar_for_one_model_and_for_another(compilers: Grammars) -> None:
    for card in (CARD, OTHER_CARD, CARD):
        assert lark_of(await compilers.compile(Regex("ab"), card)) == "start: /ab/"
    assert len(children()) == 1


async def test_equal_grammars_are_compiled_once(compilers: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = count_orders(monkeypatch)
    texts = await asyncio.gather(*(compilers.compile(Regex("ab"), CARD) for _ in range(5)))
    assert len(set(texts)) == 1
    await compilers.compile(Regex("ab"), CARD)
    for _ in range(2):
        with pytest.raises(InvalidGrammar, match="unclosed"):
            await compilers.compile(Regex("["), CARD)
    assert orders == [Regex("ab"), Regex("[")]


def count_orders(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Return the list that every order's source is added to."""
    orders: list[Source] = []
    real = Compiler.compile

    async def counted(self: Compiler, order: Any, *others: Any) -> Any:
        orders.append(order.source)
        return await real(self, order, *others)

    monkeypatch.setattr(Compiler, "compile", counted)
    return orders


async def test_what_was_not_asked_for_in_a_long_time_is_forgotten(
    compilers: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
    orders = count_orders(monkeypatch)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        await compilers.compile(Regex(pattern), CARD)
    assert orders == [Regex(pattern) for pattern in ("a", "b", "c", "b")]


@pytest.mark.parametrize("source", [ENDLESS, DEEP], ids=["never compiled", "exhausts the stack"])
async def test_b032_what_cannot_be_compiled_ends_its_process_and_nothing_else(
    compilers: Grammars, source: Source
) -> None:
    await compilers.compile(Regex("ab"), CARD)
    doomed = asyncio.create_task(compilers.compile(source, CARD))
    beside = [compilers.compile(Choice((str(number),)), CARD) for number in range(3)]
    assert len(await asyncio.gather(*beside)) == 3
    with pytest.raises(InvalidGrammar, match="cannot be compiled within"):
        await doomed
    assert len(children()) <= 2
    assert await compilers.compile(Regex("cd"), CARD)


async def test_the_loop_goes_on_meanwhile(compilers: Grammars) -> None:
    await compilers.compile(Regex("ab"), CARD)
    doomed = asyncio.create_task(compilers.compile(ENDLESS, CARD))
    num_turns, started = 0, time.monotonic()
    while not doomed.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 50 * (time.monotonic() - started)  # 1 ms each, were the machine idle
    assert isinstance(doomed.exception(), InvalidGrammar)


async def test_who_leaves_takes_no_answer_from_who_stays(compilers: Grammars) -> None:
    leaver, stayer = (asyncio.create_task(compilers.compile(Regex("ab"), CARD)) for _ in range(2))
    await until(lambda: compilers._running, "it is being compiled")
    leaver.cancel()
    assert await stayer


async def test_a_process_that_was_killed_is_replaced(compilers: Grammars) -> None:
    await compilers.compile(Regex("ab"), CARD)
    (process,) = children()
    process.kill()
    await until(lambda: process.status() == psutil.STATUS_ZOMBIE, "it is dead")
    with pytest.raises(InvalidGrammar, match="cannot be compiled within"):
        await compilers.compile(Regex("cd"), CARD)
    assert await compilers.compile(Regex("cd"), CARD)  # not remembered


async def test_too_many_wait(compilers: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 1)
    first = asyncio.create_task(compilers.compile(Regex("ab"), CARD))
    await until(lambda: compilers._running, "it is being compiled")
    with pytest.raises(Overloaded):
        await compilers.compile(Regex("cd"), CARD)
    assert await first
    assert await compilers.compile(Regex("cd"), CARD)


async def test_no_process_can_be_started(compilers: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_spawn", refuse_to_spawn)
    with pytest.raises(Unavailable):
        await compilers.compile(Regex("ab"), CARD)
    monkeypatch.undo()
    assert await compilers.compile(Regex("ab"), CARD)


def refuse_to_spawn(*_: object) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("changes", [{"tokenizer": b"?"}, {"eos_ids": ()}])
async def test_a_model_whose_tokenizer_can_follow_no_grammar(compilers: Grammars, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidGrammar, match=r"tokenizer|no token ends"):
        await compilers.compile(Regex("ab"), tiny_card(**changes))


async def test_closing_ends_what_is_being_compiled() -> None:
    compilers = Grammars(num_compilers=1, limit_s=60.0)
    await compilers.compile(Regex("ab"), CARD)
    doomed = asyncio.create_task(compilers.compile(ENDLESS, CARD))
    await until(lambda: any(process.cpu_times().user > 0.5 for process in children()), "it computes")
    await compilers.close()
    assert not children()
    with pytest.raises(asyncio.CancelledError):
        await doomed


GATEWAY = """
import asyncio, sys
from gateway.guidance.grammars import Grammars
from gateway.guidance.source import JsonSchema
from tests.support.tiny_tokenizer import tiny_card

async def main():
    await Grammars(1, 600.0).compile(JsonSchema(sys.argv[1]), tiny_card())

asyncio.run(main())
"""


async def test_a_compiler_dies_with_its_gateway_whatever_it_does() -> None:
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", GATEWAY, ENDLESS.schema, cwd=ROOT)
    try:
        await until(lambda: any(child.cpu_times().user > 0.5 for child in children()), "it computes", 30)
        (orphan,) = children()
    finally:
        gateway.kill()
        await gateway.wait()
    await until(lambda: not is_alive(orphan.pid), "it is gone", 30)
