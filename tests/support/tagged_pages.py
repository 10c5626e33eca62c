"""An engine's runner without a model: it writes into each page which tokens it stands for, and samples the next token
from nothing but the bytes of all pages of the sequence. A wrong, stale or half-written page becomes a wrong token.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from common.cache.layout import KVLayout
from common.errors import GrammarViolated
from common.messages.chain import EMPTY_CHAIN, chain_of, extend_chain
from common.messages.ids import BlockId
from common.messages.logprobs import TokenLogprobs
from common.runtime.runner import TokenMasks
from common.runtime.warm_up import WARM_UP
from common.scheduling.plan import Chunk, StepPlan, StepResult
from common.scheduling.sequence import Sequence as SequenceState
from common.scheduling.sequence import SequenceKey
from common.transfer.pool_memory import PoolMemory
from tests.support.likelihoods import likelihood, prompt_likelihoods
from tests.support.valve import Valve

BLOCK_SIZE = 4
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
"""One tag of 8 bytes per token."""

TAG_BYTES = LAYOUT.token_bytes
VOCABULARY = 997


def answer(prompt: Sequence[int], max_tokens: int, stop_ids: Iterable[int] = (), choice: int = 0) -> list[int]:
    """Return what a choice generates over pages that hold what they should."""
    tags, chain = bytearray(), EMPTY_CHAIN
    generated: list[int] = []
    for token in prompt:
        chain = extend_chain(chain, token)
        tags += chain.to_bytes(TAG_BYTES, "little")
    while len(generated) < max_tokens:
        generated.append(_sample(tags, choice))
        if generated[-1] in stop_ids:
            break
        chain = extend_chain(chain, generated[-1])
        tags += chain.to_bytes(TAG_BYTES, "little")
    return generated


def page_of(memory: PoolMemory, page: int, prompt: Sequence[int], block_index: int) -> bool:
    """Return whether a page holds that block of the prompt, as far as the prompt fills it."""
    start = block_index * BLOCK_SIZE
    tags = [chain_of(prompt[: position + 1]) for position in range(start, min(len(prompt), start + BLOCK_SIZE))]
    wanted = b"".join(tag.to_bytes(TAG_BYTES, "little") for tag in tags)
    return bytes(memory.page(BlockId(page)))[: len(wanted)] == wanted


class TaggedRunner:
    """Implements `common.runtime.engine.Runner` over the memory of one pool. Steps begin when `valve` lets them."""

    def __init__(self, valve: Valve, pages: memoryview, block_size: int, masks: TokenMasks | None = None) -> None:
        assert block_size == BLOCK_SIZE
        self._masks = masks
        self._valve = valve
        self._pages = pages

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan."""
        spans = [(chunk.sequence.key, chunk.start, chunk.length) for chunk in plan.chunks]
        if all(key.request != WARM_UP for key, *_ in spans):  # what no test asks for passes the valve by
            self._valve.enter(spans)
        for copy in plan.copies:
            self._pages[_span(copy.target)] = self._pages[_span(copy.source)]
        tokens: dict[SequenceKey, int] = {}
        violated: set[SequenceKey] = set()
        prompts: dict[SequenceKey, tuple[TokenLogprobs, ...]] = {}
        for chunk in plan.chunks:
            self._write(chunk)
            key = chunk.sequence.key
            if chunk.samples:
                tags = self._read(chunk.sequence.block_ids, chunk.start + chunk.length)
                try:
                    tokens[key] = self._within_grammar(chunk.sequence, _sample(tags, key.choice))
                except GrammarViolated:
                    violated.add(key)
            if chunk.sequence.wants_prompt_logprobs:
                prompts[key] = prompt_likelihoods(chunk)
        asking = {chunk.sequence.key for chunk in plan.chunks if chunk.sequence.sampling.num_logprobs is not None}
        logprobs = {key: likelihood(token) for key, token in tokens.items() if key in asking}
        return StepResult(tokens, violated=frozenset(violated), logprobs=logprobs, prompt_logprobs=prompts)

    def _within_grammar(self, sequence: SequenceState, token: int) -> int:
        """Return the token, or one that the grammar of the sequence allows in place of it."""
        allowed = None if self._masks is None else self._masks.allowed(sequence)
        if allowed is None:
            return token
        ids = [32 * place + bit for place, word in enumerate(allowed.tolist()) for bit in range(32) if word >> bit & 1]
        if not ids:
            raise GrammarViolated("no token is allowed")
        return ids[token % len(ids)]

    def _write(self, chunk: Chunk) -> None:
        blocks = chunk.sequence.block_ids
        known = self._read(blocks, chunk.start)
        chain = int.from_bytes(known[-TAG_BYTES:], "little") if known else EMPTY_CHAIN
        for position in range(chunk.start, chunk.start + chunk.length):
            chain = extend_chain(chain, chunk.sequence.token_ids[position])
            start = self._offset(blocks, position)
            self._pages[start : start + TAG_BYTES] = chain.to_bytes(TAG_BYTES, "little")

    def _read(self, blocks: Sequence[BlockId], num_tokens: int) -> bytes:
        starts = [self._offset(blocks, position) for position in range(num_tokens)]
        return b"".join(self._pages[start : start + TAG_BYTES] for start in starts)

    @staticmethod
    def _offset(blocks: Sequence[BlockId], position: int) -> int:
        return (blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE) * TAG_BYTES


def _span(block: BlockId) -> slice:
    page_bytes = BLOCK_SIZE * TAG_BYTES
    return slice(block * page_bytes, (block + 1) * page_bytes)


def _sample(tags: bytes | bytearray, choice: int) -> int:
    salt = choice.to_bytes(4, "little") if choice else b""
    return int.from_bytes(blake2b(tags, digest_size=8, salt=salt).digest(), "little") % VOCABULARY
