"""Logprobs that nobody has read yet, packed: 4 bytes for a token and 8 for each of its alternatives."""

import math
from array import array
from collections.abc import Sequence
from itertools import islice

from common.messages.logprobs import TokenLogprobs
from gateway.losses import Contradiction
from proto import worker_pb2 as pb


class LogprobBuffer:
    """Of consecutive tokens. `max_top`: at most so many alternatives may be beside each."""

    def __init__(self, max_top: int) -> None:
        self._max_top = max_top
        self._clear()

    def __len__(self) -> int:
        return len(self._logprobs)

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return 6 * len(self._logprobs) + 8 * len(self._top_ids)

    def add(self, entries: Sequence[pb.TokenLogprobs]) -> None:
        """Append those of the next tokens; raise `Contradiction`, with nothing appended, if they make no sense."""
        for entry in entries:
            self._check(entry)
        for entry in entries:
            self._logprobs.append(entry.logprob)
            self._num_top.append(len(entry.top_ids))
            self._top_ids.extend(entry.top_ids)
            self._top_logprobs.extend(entry.top_logprobs)

    def drain(self, num_tokens: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Return those of the first so many tokens, None: of all, and forget them."""
        logprobs, nums_top = self._logprobs[:num_tokens], self._num_top[:num_tokens]
        num_alternatives = sum(nums_top)
        alternatives = zip(self._top_ids[:num_alternatives], self._top_logprobs[:num_alternatives], strict=True)
        drained = tuple(
            TokenLogprobs(logprob, tuple(islice(alternatives, num_top)))
            for logprob, num_top in zip(logprobs, nums_top, strict=True)
        )
        del self._logprobs[: len(drained)], self._num_top[: len(drained)]
        del self._top_ids[:num_alternatives], self._top_logprobs[:num_alternatives]
        return drained

    def _check(self, entry: pb.TokenLogprobs) -> None:
        num_top = len(entry.top_ids)
        if num_top != len(entry.top_logprobs) or num_top > self._max_top:
            raise Contradiction(f"{len(entry.top_logprobs)} logprobs of {num_top} alternatives, asked: {self._max_top}")
        if math.isnan(entry.logprob) or any(map(math.isnan, entry.top_logprobs)):
            raise Contradiction("a logprob is not a number")

    def _clear(self) -> None:
        self._logprobs = array("f")
        self._num_top = array("H")
        self._top_ids = array("I")
        self._top_logprobs = array("f")
