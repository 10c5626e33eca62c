"""The first steps of an engine, before it has any work.

What is slow only once happens here: weights come into memory, kernels are compiled, threads are started. A worker says
that it is ready behind them, and only then its steps are judged by how long they take (`common/runtime/stall.py`).
"""

import logging
import time

from common.messages.ids import BlockId, PlacementNumber, RequestId
from common.messages.sampling import SamplingParams
from common.runtime.engine import Runner
from common.scheduling.plan import Chunk, StepPlan
from common.scheduling.sequence import Sequence, SequenceKey

logger = logging.getLogger(__name__)

WARM_UP = RequestId("warm-up")
"""Not the name of any request of a client: those are random."""


def warm_up(runner: Runner, block_size: int, max_context: int) -> None:
    """Compute a prompt of more than one block and draw the two tokens behind it, by every step of the sampler.

    The pool's first pages are written; nobody owns them yet, and nobody reads what is left there.
    """
    started_s = time.monotonic()
    num_tokens = max(1, min(block_size + 1, max_context - 1))
    blocks = [BlockId(index) for index in range(num_tokens // block_size + 1)]
    sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.5, top_p=0.5)
    key = SequenceKey(WARM_UP, PlacementNumber(0))
    sequence = Sequence(key, [0] * num_tokens, num_tokens, sampling, arrival=0, block_ids=blocks)
    result = runner.run(StepPlan((Chunk(sequence, 0, num_tokens, samples=True),)))
    if num_tokens < max_context:
        sequence.num_computed = num_tokens
        sequence.token_ids.append(result.tokens.get(key, 0))
        runner.run(StepPlan((Chunk(sequence, num_tokens, 1, samples=True),)))
    logger.info("warmed up in %.1f s", time.monotonic() - started_s)
