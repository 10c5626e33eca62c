"""One choice of a request as its gateway sees it: which of its tokens the client has, and what may follow them.

However far its reader lags, a choice holds nothing but the ids themselves, the packed logprobs of those that were not
read yet, and one end: tokens that were not read yet are read together, in deltas of some size.
"""

from array import array
from collections.abc import Sequence

from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.codec import pack_ids
from common.messages.ids import ChoiceIndex
from common.messages.job import OpenChoice
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, FinishReason, StageTimes, TokenDelta
from gateway.logprob_buffer import LogprobBuffer
from gateway.losses import Contradiction
from proto import worker_pb2 as pb

MAX_READ = 64
"""Tokens of one delta: with logprobs and twenty alternatives these are 0.2 MB of JSON and 2 ms of work. A client that
lags behind by thousands must not get them in one piece, for which all others would wait."""

BYTES_PER_TOKEN = 48
"""Of a shown id: an int, its place in the list, its link of the chain."""

NUM_IDS = 2**32
"""Ids that a frame can name."""


class Choice:
    """Owned by its `Stream`."""

    def __init__(self, index: ChoiceIndex, sampling: SamplingParams, vocab_size: int | None = None) -> None:
        self.index = index
        self.shown: list[int] = []
        """Every token taken, by the client's reader or waiting for it."""
        self.is_open = True
        """Whether more of it is to come: it has not ended, and somebody wants it."""
        self.is_queued = False
        """Whether it stands among those with news, for its owner to keep."""
        self._sampling = sampling
        self._vocab_size = NUM_IDS if vocab_size is None else vocab_size
        self._chains = array("Q", [EMPTY_CHAIN])
        self._num_read = 0
        self._num_shown_before = 0
        self._logprobs = None if sampling.num_logprobs is None else LogprobBuffer(sampling.num_logprobs)
        self._end: tuple[FinishReason, StageTimes | None] | None = None

    @property
    def num_own_tokens(self) -> int:
        """Tokens that came from the current placement."""
        return len(self.shown) - self._num_shown_before

    @property
    def num_unread_bytes(self) -> int:
        """About how much memory its unread tokens take, with their logprobs."""
        num_logprobs = 0 if self._logprobs is None else self._logprobs.num_bytes
        return BYTES_PER_TOKEN * (len(self.shown) - self._num_read) + num_logprobs

    @property
    def to_continue(self) -> OpenChoice:
        """What a worker has to know to go on."""
        return OpenChoice(self.index, pack_ids(self.shown))

    def begin_placement(self) -> None:
        """Count anew what comes from one placement."""
        self._num_shown_before = len(self.shown)

    def extend(self, tokens: pb.Tokens) -> bool:
        """Take the tokens that are new; False if none is. Raises `Contradiction`: nothing is taken then."""
        shown, chains = self.shown, self._chains
        index, ids = tokens.index, tokens.ids[:]
        num_known = len(shown) - index
        if num_known < 0:
            raise Contradiction("token frames are missing")
        if tokens.chain != chains[index] or (num_known and ids[:num_known] != shown[index : index + len(ids)]):
            raise Contradiction("the worker continued other tokens than were shown")
        new = ids[num_known:] if num_known else ids
        if new and max(new) >= self._vocab_size:
            raise Contradiction(f"token id {max(new)} is outside the vocabulary of {self._vocab_size}")
        if self._logprobs is not None:
            self._take_logprobs(self._logprobs, tokens, num_known)
        chain = chains[-1]
        for token_id in new:
            chain = extend_chain(chain, token_id)
            chains.append(chain)
        shown.extend(new)
        return bool(new)

    def finish(self, reason: FinishReason, times: StageTimes | None = None) -> None:
        """It is complete."""
        self._end = (reason, times)
        self.is_open = False

    def abandon(self) -> None:
        """Nobody needs more of it: there is nothing to read either."""
        self.is_open = False
        self._num_read = len(self.shown)
        self._end = None
        self._logprobs = None

    def finished_by_shown(self) -> FinishReason | None:
        """Return the end if the shown tokens are all of it (only the terminal event was lost)."""
        sampling = self._sampling
        if self.shown and self.shown[-1] in sampling.stop_ids and len(self.shown) > sampling.min_tokens:
            return FinishReason.STOP
        if len(self.shown) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    @property
    def has_news(self) -> bool:
        """Whether tokens or the end were not read yet."""
        return self._num_read < len(self.shown) or self._end is not None

    def read(self, num_cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs] = ()) -> TokenDelta | EndOfChoice:
        """Return tokens that were not read yet, `MAX_READ` at most, else the end. There is one of them."""
        first = self._num_read
        ids = tuple(self.shown[first : first + MAX_READ])
        if ids:
            self._num_read += len(ids)
            logprobs = () if self._logprobs is None else self._logprobs.drain(len(ids))
            return TokenDelta(first, ids, num_cached_tokens, self.index, logprobs, prompt_logprobs)
        assert self._end is not None
        (reason, times), self._end = self._end, None
        return EndOfChoice(reason, len(self.shown), num_cached_tokens, self.index, times)

    def _take_logprobs(self, buffer: LogprobBuffer, tokens: pb.Tokens, num_known: int) -> None:
        if len(tokens.logprobs) != len(tokens.ids):
            raise Contradiction(f"{len(tokens.logprobs)} logprobs for {len(tokens.ids)} tokens")
        buffer.add(tokens.logprobs[num_known:])
