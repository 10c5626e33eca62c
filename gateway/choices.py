"""All choices of one request as its gateway sees them: what a placement goes on with, what the client reads next."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from common.messages.ids import ChoiceIndex
from common.messages.job import OpenChoice
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from gateway.choice import Choice
from gateway.engine import EndOfChoice, FinishReason, GenerateRequest, StageTimes, TokenDelta
from gateway.losses import Contradiction
from gateway.prompt_logprobs import PromptLogprobs
from proto import worker_pb2 as pb

_REASONS = {reason.value: reason for reason in FinishReason}


class Choices:
    """Owned by a `Stream`. Whatever contradicts what is known here is a `Contradiction`, and then nothing is taken."""

    def __init__(self, request: GenerateRequest) -> None:
        self.all = [
            Choice(ChoiceIndex(index), request.sampling, request.vocab_size) for index in range(request.num_choices)
        ]
        self._request = request
        self._num_open = len(self.all)
        self._queued: deque[Choice] = deque()
        """Choices with news, each of them once."""
        self._num_cached_tokens: int | None = None
        self._lacks_prompt_logprobs = request.sampling.num_prompt_logprobs is not None
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        """Until they are read."""

    @property
    def is_complete(self) -> bool:
        """Whether no choice goes on."""
        return self._num_open == 0

    @property
    def has_news(self) -> bool:
        """Whether tokens or an end were not read yet."""
        return bool(self._queued)

    @property
    def to_continue(self) -> tuple[OpenChoice, ...]:
        """The choices of the next placement."""
        return tuple(choice.to_continue for choice in self.all if choice.is_open)

    @property
    def nums_shown(self) -> list[int]:
        """How many tokens of each of these choices were shown."""
        return [len(choice.shown) for choice in self.all if choice.is_open]

    @property
    def sampling(self) -> SamplingParams:
        """What the next placement is asked for: prompt logprobs only until they are here."""
        sampling = self._request.sampling
        if self._lacks_prompt_logprobs or sampling.num_prompt_logprobs is None:
            return sampling
        return replace(sampling, num_prompt_logprobs=None)

    @property
    def num_unread_bytes(self) -> int:
        """About how much memory that takes which was not read yet."""
        return sum(choice.num_unread_bytes for choice in self._queued)

    @property
    def num_own_tokens(self) -> int:
        """Tokens of one choice that came from the current placement, of the one with most."""
        return max(choice.num_own_tokens for choice in self.all)

    def begin_placement(self) -> None:
        """Count anew what comes from one placement."""
        for choice in self.all:
            choice.begin_placement()

    def read(self) -> TokenDelta | EndOfChoice:
        """Return news; there are some."""
        choice = self._queued.popleft()
        choice.is_queued = False
        item = self.read_one(choice)
        if choice.has_news:
            self.queue(choice)
        return item

    def queue(self, choice: Choice) -> None:
        """Let a choice with news be read behind all others."""
        if not choice.is_queued:
            choice.is_queued = True
            self._queued.append(choice)

    def read_one(self, choice: Choice) -> TokenDelta | EndOfChoice:
        """Return news of a choice that has some and is not queued; it may have more behind them."""
        prompt_logprobs: Sequence[TokenLogprobs] = ()
        if self._prompt_logprobs:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        return choice.read(self._num_cached_tokens or 0, prompt_logprobs)

    def abandon(self, index: ChoiceIndex) -> bool:
        """Nobody needs more of a choice: nothing of it is read any more. Return whether it went on."""
        choice = self.all[index]
        if choice.is_queued:
            choice.is_queued = False
            self._queued.remove(choice)
        was_open = choice.is_open
        self._num_open -= was_open
        choice.abandon()
        return was_open

    def finish_shown(self) -> None:
        """End those of which all tokens were shown: only their terminal event was lost."""
        for choice in self.all:
            if choice.is_open and (reason := choice.finished_by_shown()) is not None:
                self._finish(choice, reason)

    def take(self, tokens: pb.Tokens) -> Choice | None:
        """Take what is new among a worker's tokens; return their choice if it is to be queued or read right now."""
        choices, index = self.all, tokens.choice
        choice = choices[index] if index < len(choices) else self._choice(index)
        if self._lacks_prompt_logprobs:
            self._take_prompt_logprobs(tokens)
        if not choice.is_open:
            return None
        if not choice.extend(tokens):
            return None
        # What the first placement found stands: a later one may hit what the first one has computed.
        if self._num_cached_tokens is None and tokens.HasField("num_cached_tokens"):
            self._num_cached_tokens = tokens.num_cached_tokens
        return None if choice.is_queued else choice

    def take_early(self, tokens: pb.Tokens) -> None:
        """Take a copy that was sent ahead, unless it contradicts anything: its author repeats what is true of it.

        It has no logprobs of the prompt, so none is taken while these are missing.
        """
        with suppress(Contradiction):
            if (choice := self.take(tokens)) is not None:
                self.queue(choice)

    def take_end(self, finished: pb.Finished, queue_s: float) -> None:
        """Take the end of a choice that goes on."""
        choice = self._choice(finished.choice)
        if not choice.is_open:
            return
        if finished.num_generated != len(choice.shown):
            raise Contradiction("the last token frames are missing")
        reason = _REASONS.get(finished.reason)
        if reason is None:
            raise Contradiction(f"an end for no reason that is known: {finished.reason!r}")
        if self._num_cached_tokens is None:
            self._num_cached_tokens = finished.num_cached_tokens
        self._finish(choice, reason, _times(finished, queue_s))

    def _choice(self, index: int) -> Choice:
        if index >= len(self.all):
            raise Contradiction(f"choice {index} was not asked for")
        return self.all[index]

    def _take_prompt_logprobs(self, tokens: pb.Tokens) -> None:
        num_wanted = len(self._request.prompt_ids) - 1
        if len(tokens.prompt_logprobs) != num_wanted:
            raise Contradiction(f"{len(tokens.prompt_logprobs)} logprobs for {num_wanted} tokens of the prompt")
        self._prompt_logprobs = PromptLogprobs(tokens.prompt_logprobs)
        self._lacks_prompt_logprobs = False

    def _finish(self, choice: Choice, reason: FinishReason, times: StageTimes | None = None) -> None:
        choice.finish(reason, times)
        self.queue(choice)
        self._num_open -= 1


def _times(finished: pb.Finished, queue_s: float) -> StageTimes | None:
    if not finished.HasField("times"):
        return None
    times = finished.times
    return StageTimes(queue_s, times.wait_s, times.prefill_s, times.transfer_s, times.decode_s)
