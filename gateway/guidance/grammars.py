"""The grammars of a gateway's requests: each is compiled once, in a process of its own kind, and never for long.

Compiling is the only way to know whether a grammar is one: it may loop for minutes (the multiples of a large number) or
exhaust the stack (a long chain of references), and then its process is killed and the request refused. The event loop
only waits.
"""

import asyncio
import functools
import hashlib
import logging
from collections import OrderedDict

from common.errors import InvalidGrammar, Overloaded, Unavailable
from common.messages.registry import ModelCard
from gateway.guidance.compiler import Compiler, CompilerLost
from gateway.guidance.orders import Compile, Compiled, Load, Refused, TokenizerId, Unusable
from gateway.guidance.source import Source

logger = logging.getLogger(__name__)

MAX_KNOWN = 256
"""Grammars and refusals that are remembered, of up to 128 KB each."""

MAX_WAITING = 64
"""Grammars that wait for a compiler; usual ones take 2 ms each."""

RETRY_AFTER_S = 2.0

_Key = tuple[TokenizerId, Source]
_Outcome = Compiled | Refused | Unusable


class Grammars:
    """Compiles with at most `num_compilers` processes, started when they are needed; a grammar gets `limit_s`."""

    def __init__(self, num_compilers: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seats = asyncio.Semaphore(num_compilers)
        self._idle: list[Compiler] = []
        self._known: OrderedDict[_Key, _Outcome] = OrderedDict()
        self._running: dict[_Key, asyncio.Task[_Outcome]] = {}

    async def compile(self, source: Source, card: ModelCard) -> str:
        """Return the grammar in llguidance's JSON form, for the workers of `card`'s model.

        Raises `InvalidGrammar` (of "it"), or `Unavailable`. Whoever stops waiting stops nobody else.
        """
        vocabulary = _vocabulary(card)
        key = (vocabulary.id, source)
        outcome = self._known.get(key)
        if outcome is None:
            outcome = await asyncio.shield(self._task(key, vocabulary))
        else:
            self._known.move_to_end(key)
        match outcome:
            case Compiled(grammar):
                return grammar
            case Refused(reason) | Unusable(reason):
                raise InvalidGrammar(reason)

    async def close(self) -> None:
        """End all processes; whoever still waits is cancelled."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        while self._idle:
            await self._idle.pop().close()

    def _task(self, key: _Key, vocabulary: Load) -> "asyncio.Task[_Outcome]":
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise Overloaded("Too many grammars wait to be compiled.", retry_after_s=RETRY_AFTER_S)
            task = self._running[key] = asyncio.create_task(self._find_out(key, vocabulary), name="grammar")
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return task

    async def _find_out(self, key: _Key, vocabulary: Load) -> _Outcome:
        async with self._seats:
            try:
                outcome = await self._compile(Compile(*key), vocabulary)
            except CompilerLost as error:
                # Not remembered: a machine that is busy enough makes everything late.
                logger.warning("a grammar is given up: %s", error)
                return Refused(f"it cannot be compiled within {self._limit_s:g} s and the memory set aside for it")
        self._known[key] = outcome
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return outcome

    async def _compile(self, order: Compile, vocabulary: Load) -> _Outcome:
        compiler = await self._take()
        try:
            outcome = await compiler.compile(order, vocabulary, self._limit_s)
        except BaseException:  # cancelled as well: nobody knows what the process does now
            await compiler.close()
            raise
        self._idle.append(compiler)
        return outcome

    async def _take(self) -> Compiler:
        if self._idle:
            return self._idle.pop()
        try:
            return await Compiler.start()
        except OSError as error:
            raise Unavailable("No grammar can be compiled now.", retry_after_s=RETRY_AFTER_S) from error


def _vocabulary(card: ModelCard) -> Load:
    name = f"{_digest(card.tokenizer)} {card.vocab_size} {card.eos_ids}"
    return Load(TokenizerId(name), card.tokenizer, card.vocab_size, card.eos_ids)


@functools.lru_cache(maxsize=16)
def _digest(tokenizer: bytes) -> str:
    """Cached because a tokenizer is 0.5 MB or more; bytes keep their hash, so finding it again costs nothing."""
    return hashlib.sha256(tokenizer).hexdigest()
