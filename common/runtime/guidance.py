"""Grammars in a worker: compiled once each in a thread of their own, followed in the engine by a matcher per sequence.

A matcher's state is a function of the generated tokens. Whoever generated them, an earlier placement or another worker,
it is brought up to date when the next token is wanted: a grammar needs no hand-over and no replay of its own.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher, LLTokenizer

from common.errors import GrammarViolated, InvalidGrammar, ModelUnusable
from common.grammar.matcher import compile_matcher
from common.grammar.tokenizer import grammar_tokenizer
from common.messages.registry import ModelCard
from common.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

MAX_KNOWN = 64
"""Grammars that are kept; usual ones take 0.1 to 1 MB."""

STACK_BYTES = 32 << 20
"""Eight times what gateways compile with: what they have admitted must not end a worker."""

MASKS_S = 1.0
MASK_S = 0.01
"""What the masks of one sequence may cost in all, and per token: the engine computes them between everybody's tokens.
Usual ones take 2 to 20 us, the dearest tokens of large schemas a few ms."""

_WORD_BITS = 32


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


@dataclass(slots=True)
class _Progress:
    """How far a matcher has read its sequence's answer, and what its masks have cost so far."""

    matcher: LLMatcher
    consumed: list[int] = field(default_factory=list)
    cost_s: float = 0.0


class GrammarMasks:
    """Masks for the sequences that have a grammar (`TokenMasks` of the runner). Owned by the engine thread.

    `clock` gives the seconds that this thread has computed.
    """

    def __init__(self, grammars: Grammars, clock: Callable[[], float] = time.thread_time) -> None:
        self._grammars = grammars
        self._clock = clock
        self._progress: WeakKeyDictionary[Sequence, _Progress] = WeakKeyDictionary()

    def allowed(self, sequence: Sequence) -> torch.Tensor | None:
        """Return the mask [num_words] int32 of the next token, a new one each time; None without a grammar.

        Raises `GrammarViolated` if what was generated is not of the grammar, or the grammar is too expensive to follow.
        """
        grammar = sequence.sampling.grammar
        if grammar is None:
            return None
        progress = self._progress_of(sequence, grammar)
        started = self._clock()
        self._catch_up(progress, sequence)
        words = torch.zeros(-(-self._grammars.num_tokens // _WORD_BITS), dtype=torch.int32)
        progress.matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        if progress.matcher.is_error():
            raise GrammarViolated("the grammar became too large to follow")
        progress.cost_s += self._clock() - started
        if progress.cost_s > MASKS_S + MASK_S * len(progress.consumed):
            raise GrammarViolated("the grammar is too expensive to follow")
        return words

    def _progress_of(self, sequence: Sequence, grammar: str) -> _Progress:
        """Return how far the sequence is known; from its beginning if it has another history now."""
        progress = self._progress.get(sequence)
        num_consumed = 0 if progress is None else len(progress.consumed)
        known = sequence.token_ids[sequence.num_prompt : sequence.num_prompt + num_consumed]
        if progress is None or known != progress.consumed:
            progress = self._progress[sequence] = _Progress(self._matcher(grammar))
        return progress

    def _catch_up(self, progress: _Progress, sequence: Sequence) -> None:
        new = sequence.token_ids[sequence.num_prompt + len(progress.consumed) :]
        if not progress.matcher.consume_tokens(new):
            raise GrammarViolated("the tokens so far are not of the grammar")
        progress.consumed += new

    def _matcher(self, grammar: str) -> LLMatcher:
        try:
            return self._grammars.matcher(grammar)
        except InvalidGrammar as error:
            raise GrammarViolated("the grammar cannot be compiled") from error


async def _in_thread(work: Callable[[], object]) -> None:
    """Wait for `work`, done in a thread with a large stack; it does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():  # whoever asked has gone
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - the root of the thread: whoever waits is told
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error)

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    await done
