"""The grammars of a worker's requests: each is compiled once, in a thread, before the engine has its request."""

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidGrammar, ModelUnusable
from common.grammar.matcher import compile_matcher
from common.grammar.tokenizer import grammar_tokenizer
from common.messages.registry import ModelCard

logger = logging.getLogger(__name__)

MAX_KNOWN = 64
"""Grammars that are kept; usual ones take 0.1 to 1 MB."""

STACK_BYTES = 32 << 20
"""Eight times what gateways compile with: what they have admitted must not end a worker."""


class Grammars:
    """Grammars by their text, compiled or refused. `matcher` belongs to the engine, all else to the event loop."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher | InvalidGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def num_tokens(self) -> int:
        """How many tokens a mask tells about."""
        return 0 if self._tokenizer is None else self._tokenizer.vocab_size

    def load(self) -> None:
        """Make the vocabulary ready, once, before there is work: it keeps all threads waiting for 0.2 s or more."""
        try:
            self._tokenizer = grammar_tokenizer(self._card.tokenizer, self._card.vocab_size, self._card.eos_ids)
        except ModelUnusable as error:  # everything else can be served
            logger.warning("no request may have a grammar: %s", error)

    async def prepare(self, grammar: str) -> None:
        """Compile a grammar unless it is known; raises `InvalidGrammar`. One at a time: cores are for the engine."""
        if self._find(grammar) is None:
            async with self._turn:
                if self._find(grammar) is None:  # nobody else has asked for it meanwhile
                    await _in_thread(lambda: self._compile(grammar))
        found = self._find(grammar)
        if isinstance(found, InvalidGrammar):
            raise InvalidGrammar(found.message)

    def when_ready(self, grammar: str, then: Callable[[str | None], None]) -> None:
        """Call `then` as soon as a grammar is compiled, or with the reason why it cannot be; at once if it is known."""
        if isinstance(self._find(grammar), LLMatcher):
            then(None)
            return
        task = asyncio.create_task(self._tell(grammar, then), name="grammar")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Call nobody any more."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of its text; raises `InvalidGrammar`."""
        found = self._find(grammar)
        if found is None:  # so many others came since it was prepared that it had to make room
            found = self._compile(grammar)
        if isinstance(found, InvalidGrammar):
            raise InvalidGrammar(found.message)
        return found.deep_copy()

    async def _tell(self, grammar: str, then: Callable[[str | None], None]) -> None:
        try:
            await self.prepare(grammar)
        except InvalidGrammar as error:
            then(error.message)
        else:
            then(None)

    def _find(self, grammar: str) -> LLMatcher | InvalidGrammar | None:
        with self._lock:
            found = self._known.get(grammar)
            if found is not None:
                self._known.move_to_end(grammar)
            return found

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            raise InvalidGrammar("the tokenizer of this model cannot follow it")
        try:
            compiled = compile_matcher(self._tokenizer, grammar)
        except InvalidGrammar as error:
            self._keep(grammar, error)
            raise
        self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: str, outcome: LLMatcher | InvalidGrammar) -> None:
        with self._lock:
            self._known[grammar] = outcome
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


async def _in_thread(work: Callable[[], object]) -> None:
    """Wait for `work`, done in a thread with a large stack; it does not keep the process from ending.

    Raises `InvalidGrammar`, whatever the reason: one grammar's trouble is nobody else's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: InvalidGrammar | None) -> None:
        if done.done():  # whoever asked has gone
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: InvalidGrammar | None = None
        try:
            work()
        except InvalidGrammar as refusal:
            error = refusal
        except BaseException:  # the root of the thread: whoever waits is told
            logger.exception("the compiler of grammars has failed")
            error = InvalidGrammar("it cannot be compiled")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error)

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    await done
