"""Which prompts a prefill worker computes in the next step. Pure; owned by the engine thread.

The life of a sequence:

1. `add` puts it into a queue ordered by age (`arrival`).
2. `plan` first admits from the head of that queue while pages for the whole prompt are there: the cached prefix is
   pinned, the missing pages are taken. It then shares the token budget fairly among the admitted prompts.
3. `settle` tells how many leading blocks are complete (cached ones included), and the first token at the end.
4. From then on the sequence is *held*: its pages stay for peers that pull them, until `release`.

The engine calls, in this order: commands (`add`, `release`), `plan`, run, `settle`. Commands run between `settle` and
`plan`; only `release` may also come between run and `settle`, because pages are taken again by `plan` alone (the
released sequence's part of the result is ignored).
"""

from bisect import insort

from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import DoesNotFit
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.emission import FailureCode
from common.scheduling.plan import Chunk, StepPlan, StepResult
from common.scheduling.progress import Progress
from common.scheduling.sequence import Sequence, SequenceKey


def _age(sequence: Sequence) -> int:
    return sequence.arrival


def _demand(sequence: Sequence) -> int:
    return sequence.num_uncomputed


class PrefillScheduler:
    """Chunked prefill over one pool. `token_budget` bounds the tokens of a step, `chunk_size` one prompt's share."""

    def __init__(
        self, pool: BlockPool, prefix: PrefixCache, *, block_size: int, token_budget: int, chunk_size: int
    ) -> None:
        assert token_budget > 0
        assert chunk_size > 0
        self._blocks = SequenceBlocks(pool, prefix, block_size)
        self._token_budget = token_budget
        self._chunk_size = chunk_size
        # A share below one block would finish nothing that a peer can pull.
        self._max_prompts_per_step = max(1, token_budget // min(block_size, chunk_size))
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._waiting: list[Sequence] = []
        """Oldest first."""
        self._running: list[Sequence] = []
        """The one whose turn is next first."""
        self._held: list[Sequence] = []
        self.num_cancelled_chunks = 0
        """Chunks of prompts that were released before they were computed."""

    @property
    def num_running(self) -> int:
        """Prompts that have their pages and are being computed."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Prompts without pages."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Finished prompts whose pages have not been released."""
        return len(self._held)

    @property
    def num_uncomputed(self) -> int:
        """Tokens of prompts that wait or are being computed."""
        return sum(sequence.num_uncomputed for sequence in (*self._waiting, *self._running))

    def sequence(self, key: SequenceKey) -> Sequence | None:
        """Return the sequence of that key, or None when it is released or was never here."""
        return self._sequences.get(key)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence by its age. Raises `DoesNotFit` if its prompt exceeds the whole pool."""
        assert sequence.key not in self._sequences, f"{sequence.key} is here already"
        if sequence.num_tokens > self._blocks.capacity:
            raise DoesNotFit(sequence.num_tokens, self._blocks.capacity)
        self._sequences[sequence.key] = sequence
        insort(self._waiting, sequence, key=_age)

    def release(self, key: SequenceKey) -> bool:
        """Drop a sequence in any state and release its pages; False if it is over or was never here. Idempotent."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self.num_cancelled_chunks += -(-sequence.num_uncomputed // self._chunk_size)
        self._leave(sequence)
        return True

    def plan(self) -> StepPlan:
        """Admit what fits, then decide the next step.

        Shares are fair: nobody gets more than another who could use it. Where there are more prompts than shares of a
        useful size, they take turns.
        """
        self._admit()
        turn = self._running[: self._max_prompts_per_step]
        self._running = self._running[len(turn) :] + turn
        chunks: list[Chunk] = []
        budget = self._token_budget
        for position, sequence in enumerate(sorted(turn, key=_demand)):
            fair_share = budget // (len(turn) - position)
            length = min(sequence.num_uncomputed, self._chunk_size, fair_share)
            chunks.append(Chunk(sequence, sequence.num_computed, length, samples=length == sequence.num_uncomputed))
            budget -= length
        return StepPlan(tuple(chunks))

    def settle(self, plan: StepPlan, result: StepResult) -> list[Progress]:
        """Close a step: record what is computed; tell about every prompt of the plan that is still here."""
        progress: list[Progress] = []
        for chunk in plan.chunks:
            if self._sequences.get(chunk.sequence.key) is not chunk.sequence:
                continue  # released while the step ran
            if chunk.sequence.key in result.invalid:
                self._blocks.forget(chunk.sequence)
                progress.append(self._fail(chunk.sequence, FailureCode.INVALID_LOGITS))
            elif chunk.sequence.key in result.violated:
                progress.append(self._fail(chunk.sequence, FailureCode.GRAMMAR_VIOLATED))
            else:
                progress.append(self._advance(chunk, result))
        return progress

    def violations(self) -> list[str]:
        """Return what is wrong with the accounts of the blocks and the queues, one text each. For idle times."""
        queued = [*self._waiting, *self._running, *self._held]
        texts = self._blocks.violations(self._sequences.values())
        if {sequence.key for sequence in queued} != self._sequences.keys() or len(queued) != len(self._sequences):
            texts.append(f"{len(self._sequences)} prompts stand {len(queued)} times in the queues")
        return texts

    def _admit(self) -> None:
        while self._waiting and self._blocks.acquire(self._waiting[0]):
            self._running.append(self._waiting.pop(0))

    def _advance(self, chunk: Chunk, result: StepResult) -> Progress:
        sequence = chunk.sequence
        self._blocks.advance(sequence, chunk.length)
        sequence.prompt_logprobs += result.prompt_logprobs.get(sequence.key, ())
        if not chunk.samples:
            return Progress(sequence.key, self._blocks.num_full(sequence), num_cached=sequence.num_cached)
        self._running.remove(sequence)
        self._held.append(sequence)
        return Progress(
            sequence.key,
            len(sequence.block_ids),
            result.tokens[sequence.key],
            num_cached=sequence.num_cached,
            logprobs=result.logprobs.get(sequence.key),
            prompt_logprobs=tuple(sequence.prompt_logprobs),
        )

    def _leave(self, sequence: Sequence) -> None:
        self._blocks.release(sequence)
        for queue in (self._waiting, self._running, self._held):
            if sequence in queue:
                queue.remove(sequence)

    def _fail(self, sequence: Sequence, failure: FailureCode) -> Progress:
        del self._sequences[sequence.key]
        self._leave(sequence)
        return Progress(sequence.key, 0, failure=failure)
