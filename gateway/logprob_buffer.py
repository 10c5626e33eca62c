"""Logprobs that nobody has read yet, packed: 4 bytes for a token and 8 for each of its alternatives."""

import math
from array import array
from collections.abc import Sequence

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

    def add(self, entries: Sequence[pb.TokenLogprobs]) -> None:
        """Append those of the next tokens; raise `Contradiction`, with nothing appended, if they make no sense."""
        for entry in entries:
            self._check(entry)
        for entry in entries:
            self._logprobs.append(entry.logprob)
            self._num_top.append(len(entry.top_ids))
            self._top_ids.extend(entry.top_ids)
            self._top_logprobs.extend(entry.top_logprobs)

    def drain(self) -> tuple[TokenLogprobs, ...]:
        """Return all of them and forget them."""
        alternatives = zip(self._top_ids, self._top_logprobs, strict=True)
        drained = tuple(
            TokenLogprobs(logprob, tuple(next(alternatives) for _ in range(num_top)))
            for logprob, num_top in zip(self._logprobs, self._num_top, strict=True)
        )
        self._clear()
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
