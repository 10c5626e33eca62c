"""Which tokens may come next: in the engine, every sequence that has a grammar is followed by a matcher of its own.

A matcher's state is a function of the generated tokens. Whoever generated them, an earlier placement or another worker,
it is brought up to date when the next token is wanted: a grammar needs no hand-over and no replay of its own.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher

from common.errors import GrammarViolated, InvalidGrammar
from common.runtime.grammars import Grammars
from common.scheduling.sequence import Sequence

MASKS_S = 1.0
MASK_S = 0.01
"""What the masks of one sequence may cost in all, and per token: the engine computes them between everybody's tokens.
Usual ones take 2 to 20 us, the dearest tokens of large schemas a few ms."""

_WORD_BITS = 32


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
