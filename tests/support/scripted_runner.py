"""A runner without a model: the next token is a function of the prefix alone, so scheduling must not change it."""

from collections.abc import Iterable, Sequence

from common.messages.chain import chain_of
from common.messages.ids import BlockId
from common.scheduling.plan import BlockCopy, StepPlan, StepResult
from common.scheduling.sequence import FinishReason, SequenceKey
from common.scheduling.sequence import Sequence as SchedulerSequence
from tests.support.likelihoods import likelihood, prompt_likelihoods
from tests.support.paged_content import PagedContent

VOCABULARY = 5


def next_token(token_ids: Sequence[int], choice: int = 0) -> int:
    """Return the only token that can follow these in that choice."""
    return (chain_of(token_ids) + choice) % VOCABULARY


def solo_output(
    prompt: Sequence[int], stop_ids: Iterable[int], max_tokens: int, max_held: int, choice: int = 0
) -> tuple[list[int], FinishReason]:
    """Return what a sequence generates alone; it ends when it has `max_held` tokens."""
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(token_ids, choice))
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
        for copy in plan.copies:
            self._copy(copy, holders)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._content.verify(sequence.token_ids, sequence.cache_salt, sequence.block_ids, range(chunk.start))
        for chunk in plan.chunks:
            sequence = chunk.sequence
            self._write(sequence, range(chunk.start, chunk.start + chunk.length), holders)
        tokens = {
            chunk.sequence.key: next_token(chunk.sequence.token_ids, chunk.sequence.key.choice)
            for chunk in plan.chunks
            if chunk.samples and chunk.sequence.key not in invalid
        }
        logprobs = {
            chunk.sequence.key: likelihood(tokens[chunk.sequence.key])
            for chunk in plan.chunks
            if chunk.sequence.key in tokens and chunk.sequence.sampling.num_logprobs is not None
        }
        prompts = {
            chunk.sequence.key: prompt_likelihoods(chunk)
            for chunk in plan.chunks
            if chunk.sequence.wants_prompt_logprobs and chunk.start < chunk.sequence.num_prompt - 1
        }
        return StepResult(tokens, invalid, logprobs=logprobs, prompt_logprobs=prompts)

    def _copy(self, copy: BlockCopy, holders: list[tuple[SchedulerSequence, frozenset[BlockId]]]) -> None:
        """Copy a page that has an owner into one that has no other."""
        assert any(copy.source in blocks for _, blocks in holders), f"nobody owns block {copy.source}"
        assert sum(copy.target in blocks for _, blocks in holders) == 1, f"block {copy.target} is nobody's own"
        self._content.copy(copy.source, copy.target)

    def _write(
        self, sequence: SchedulerSequence, span: range, holders: list[tuple[SchedulerSequence, frozenset[BlockId]]]
    ) -> None:
        self._content.write(sequence.token_ids, sequence.cache_salt, sequence.block_ids, span)
        touched = self._content.blocks(sequence.block_ids, span)
        for other, blocks in holders:
            assert other is sequence or not touched & blocks, f"{sequence.key} writes into blocks of {other.key}"
