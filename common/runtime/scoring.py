"""How likely tokens were under the model's raw logits: sampled ones, and those of prompts.

Only rows that ask for it cost anything.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several

import torch

from common.messages.logprobs import TokenLogprobs
from common.scheduling.plan import Chunk
from common.scheduling.sequence import SequenceKey
from kernels.sampling.logprobs import row_logprobs

SLICE_ROWS = 64
"""Rows of a prompt whose logits exist at one time: 12.6 MB for 49,152 tokens, 67 MB for 262,144. The bundled model's
head takes 1.2 ms a row on one core; 256 rows at a time take 1.04 ms each."""


def token_logprobs(logits: torch.Tensor, tokens: Several[int], num_top: Several[int]) -> list[TokenLogprobs]:
    """Return the logprobs of `tokens` and of each row's `num_top` likeliest; `logits` is [num_rows, vocab] fp32."""
    rows = row_logprobs(logits, tokens, max(num_top, default=0))
    tops = zip(rows.top_ids.tolist(), rows.of_top.tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:count], numbers[:count], strict=True)))
        for logprob, (ids, numbers), count in zip(rows.of_tokens.tolist(), tops, num_top, strict=True)
    ]


def sampled_logprobs(
    logits: torch.Tensor, chunks: Several[Chunk], tokens: Mapping[SequenceKey, int]
) -> dict[SequenceKey, TokenLogprobs]:
    """Return the logprobs of the sampled `tokens` of those `chunks`, one per row of `logits`, that ask for them."""
    rows: list[int] = []
    keys: list[SequenceKey] = []
    num_top: list[int] = []
    for row, chunk in enumerate(chunks):
        key, count = chunk.sequence.key, chunk.sequence.sampling.num_logprobs
        if count is not None and key in tokens:
            rows.append(row)
            keys.append(key)
            num_top.append(count)
    if not rows:
        return {}
    found = token_logprobs(logits[torch.tensor(rows)], [tokens[key] for key in keys], num_top)
    return dict(zip(keys, found, strict=True))


def prompt_logprobs(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, chunks: Several[Chunk]
) -> dict[SequenceKey, tuple[TokenLogprobs, ...] | None]:
    """Return the logprobs of the prompt's tokens behind the scored positions of each chunk, for those that have some.

    None: the logits hold NaN or +inf, or only -inf. `hidden` [num_scored, hidden_size] has the rows of all chunks, one
    after another; `head` makes logits of them.
    """
    found: dict[SequenceKey, tuple[TokenLogprobs, ...] | None] = {}
    first = 0
    for chunk in chunks:
        if num_rows := len(chunk.scored):
            found[chunk.sequence.key] = _score(head, hidden[first : first + num_rows], chunk)
            first += num_rows
    return found


def _score(
    head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, chunk: Chunk
) -> tuple[TokenLogprobs, ...] | None:
    num_top = chunk.sequence.sampling.num_prompt_logprobs
    assert num_top is not None
    behind = chunk.sequence.token_ids[chunk.start + 1 : chunk.start + 1 + len(hidden)]
    scores: list[TokenLogprobs] = []
    for first in range(0, len(hidden), SLICE_ROWS):
        logits = head(hidden[first : first + SLICE_ROWS])
        if not bool(logits.amax(dim=-1).isfinite().all()):
            return None
        scores += token_logprobs(logits, behind[first : first + SLICE_ROWS], [num_top] * len(logits))
    return tuple(scores)
