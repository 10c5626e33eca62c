"""Where a prompt is cheap to compute: the names of its prefixes, by which Redis finds who has them in its cache.

Nothing of it is kept in a gateway, so one that has just begun knows as much as all others.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain, islice

from common.broker.protocols import Candidate, PrefixIndex
from common.messages.codec import pack_ids
from common.messages.prefixes import MAX_BLOCKS, NO_PREFIXES, PromptPrefixes, name_prefixes
from common.messages.registry import WorkerState
from gateway.streams import Stream

MAX_CANDIDATES = 8
"""So many workers are proposed at most: each costs Redis 10 us."""

MAX_HOLDERS = 4
"""So many of them for what they have in their caches, the others because they have little to do."""

INLINE_TOKENS = 8192
"""Longer prompts are named in a thread; these take up to 0.6 ms."""


async def prefixes_to_find(stream: Stream, workers: Sequence[WorkerState]) -> PromptPrefixes:
    """Return the prefixes of prompt and shown tokens that one of the workers may have: none where there is nothing to
    choose or nothing may be used."""
    uses_cache = stream.choices.sampling.num_prompt_logprobs is None and not stream.budget.is_suspect
    if len(workers) < 2 or not uses_cache:
        return NO_PREFIXES
    record, salt = workers[0].record, stream.request.cache_salt

    def name() -> PromptPrefixes:
        shown = next((choice.shown for choice in stream.choices.all if choice.is_open), ())
        ids = list(islice(chain(stream.request.prompt_ids, shown), MAX_BLOCKS * record.block_size))
        return name_prefixes(pack_ids(ids), record.block_size, record.fingerprint, salt)

    if len(stream.request.prompt_ids) <= INLINE_TOKENS:
        return name()
    return await asyncio.to_thread(name)


async def shortlist(
    index: PrefixIndex | None, workers: Sequence[WorkerState], prefixes: PromptPrefixes
) -> list[Candidate]:
    """Return whom to propose of these workers, which come in order of load: some of those that have most of the prompt,
    then the least loaded. Raises `BrokerUnavailable`."""
    candidates = [Candidate(state.record.worker, state.record.epoch) for state in workers]
    if len(candidates) <= MAX_CANDIDATES or index is None or not prefixes.names:
        return candidates[:MAX_CANDIDATES]
    depths = await index.depths([(candidate.worker, candidate.epoch) for candidate in candidates], prefixes)
    having = [(depth, candidate) for depth, candidate in zip(depths, candidates, strict=True) if depth]
    holders = [candidate for _, candidate in sorted(having, key=lambda pair: pair[0], reverse=True)[:MAX_HOLDERS]]
    others = [candidate for candidate in candidates if candidate not in holders]
    return [*holders, *others][:MAX_CANDIDATES]
