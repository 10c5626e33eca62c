"""Where a prompt is cheap to compute: the names of its prefixes, by which Redis finds who has them in its cache.

Nothing of it is kept in a gateway, so one that has just begun knows as much as all others.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain, islice

from common.messages.codec import pack_ids
from common.messages.prefixes import MAX_BLOCKS, NO_PREFIXES, PromptPrefixes, name_prefixes
from common.messages.registry import WorkerState
from gateway.streams import Stream

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
