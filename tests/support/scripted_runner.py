"""A runner without a model: the next token is a function of the prefix alone, so scheduling must not change it."""

from collections.abc import Iterable, Sequence

from common.messages.chain import chain_of
from common.messages.ids import BlockId
from common.scheduling.plan import StepPlan, StepResult
from common.scheduling.sequence import FinishReason, SequenceKey
from common.scheduling.sequence import Sequence as SchedulerSequence
from tests.support.paged_content import PagedContent

VOCABULARY = 5


def next_token(token_ids: Sequence[int]) -> int:
    """Return the only token that can follow these."""
    return chain_of(token_ids) % VOCABULARY


def solo_output(
    prompt: Sequence[int], stop_ids: Iterable[int], max_tokens: int, max_held: int
) -> tuple[list[int], FinishReason]:
    """Return what a sequence generates alone; it ends when it has `max_held` tokens."""
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop_ids:
            return token_ids[len(prompt) :], FinishReason.STOP
        if len(token_ids) - len(prompt) == max_tokens or len(token_ids) >= max_held:
            return token_ids[len(prompt) :], FinishReason.LENGTH


class ScriptedRunner:
    """Computes plans in `content`; checks all that a step attends to before it writes anything, like one real step."""

    def __init__(self, content: PagedContent) -> None:
        self._content = content

    def run(
        self, plan: StepPlan, live: Iterable[SchedulerSequence], invalid: frozenset[SequenceKey] = frozenset()
    ) -> StepResult:
        """Compute the plan. `live` are all sequences that may hold blocks; rows in `invalid` come out as NaN."""
        holders = [(sequence, frozenset(sequence.block_ids)) for sequence in live]
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._content.verify(sequence.token_ids, sequence.cache_salt, sequence.block_ids, range(chunk.start))
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._write(sequence, range(chunk.start, chunk.start + chunk.length), holders)
        tokens = {
            chunk.sequence.key: next_token(chunk.sequence.token_ids)
            for chunk in plan.chunks
            if chunk.samples and chunk.sequence.key not in invalid
        }
        return StepResult(tokens, invalid)

    def _write(
        self, sequence: SchedulerSequence, span: range, holders: list[tuple[SchedulerSequence, frozenset[BlockId]]]
    ) -> None:
        self._content.write(sequence.token_ids, sequence.cache_salt, sequence.block_ids, span)
        touched = self._content.blocks(sequence.block_ids, span)
        for other, blocks in holders:
            assert other is sequence or not touched & blocks, f"{sequence.key} writes into blocks of {other.key}"
