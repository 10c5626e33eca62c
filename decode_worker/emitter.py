"""Turns what the engine did into events on the feeds of the gateways. The only author of terminal events."""

import time
from collections.abc import Sequence

from common.messages.ids import GatewayId
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_message
from common.runtime.feeds import FeedHub
from common.scheduling.emission import Emission, FailureCode
from decode_worker.ledger import Answer, Ledger, Live
from decode_worker.reception import TryLoss
from proto import worker_pb2 as pb

FAILURE_TEXTS = {
    FailureCode.INVALID_LOGITS: "the model computed no valid probabilities for this request",
    FailureCode.GRAMMAR_VIOLATED: "the answer could not be continued within its grammar",
    FailureCode.PREEMPTED: "the request lost its KV pages to older ones too often",
}
RETRYABLE = frozenset({FailureCode.PREEMPTED})


class Emitter:
    """Knows which gateway waits for which sequence."""

    def __init__(self, feeds: FeedHub, ledger: Ledger) -> None:
        self._feeds = feeds
        self._ledger = ledger

    def accepted(self, live: Live, *, needs_prompt: bool) -> None:
        """Confirm a job to its gateway."""
        self._push(live, accepted=pb.Accepted(needs_prompt=needs_prompt))

    def emit(self, emission: Emission) -> Live | None:
        """Send one emission; return the placement if it is over with it: all choices have ended, or one has failed."""
        live = self._ledger.get(emission.key.of_placement)
        if live is None:  # cancelled while the step ran
            return None
        live.num_cached = emission.num_cached
        if emission.failure is not None:  # also of a choice that was cancelled alone: the others have ended with it
            is_retryable = emission.failure in RETRYABLE
            self.failed(live, emission.failure, FAILURE_TEXTS[emission.failure], is_retryable=is_retryable)
            return live
        answer = live.open_answer(emission.key.choice)
        if answer is None:
            return None
        answer.num_generated = emission.index + len(emission.token_ids)
        if emission.token_ids:
            self._push(live, tokens=_tokens(live, answer, emission))
        if emission.finish is None:
            return None
        self._push(live, finished=_finished(live, answer, emission))
        answer.is_open = False
        live.finish = emission.finish
        if live.open_choices:
            return None
        live.failure = ""
        return live

    def failed(self, live: Live, code: str, message: str, *, is_retryable: bool) -> None:
        """End a placement with an error."""
        live.failure = code
        self._push(live, failed=pb.Failed(message=message, code=code, is_retryable=is_retryable))

    def try_lost(self, live: Live, loss: TryLoss) -> None:
        """Tell that a prefill worker was lost over this request; the placement goes on."""
        self._push(live, try_lost=pb.TryLost(reason=loss))

    def _push(
        self,
        live: Live,
        *,
        accepted: pb.Accepted | None = None,
        tokens: pb.Tokens | None = None,
        finished: pb.Finished | None = None,
        failed: pb.Failed | None = None,
        try_lost: pb.TryLost | None = None,
    ) -> None:
        event = pb.FeedEvent(
            request=live.job.request,
            placement=live.job.placement,
            accepted=accepted,
            tokens=tokens,
            finished=finished,
            failed=failed,
            try_lost=try_lost,
        )
        self._feeds.push(GatewayId(live.job.gateway), event)


def _tokens(live: Live, answer: Answer, emission: Emission) -> pb.Tokens:
    """Return the frame of new tokens; the first one of a placement also tells what was cached."""
    is_first = live.decoding_ns is None
    if is_first:
        live.decoding_ns = time.time_ns()
    if answer.first_token_s is None:
        answer.first_token_s = time.monotonic()
    return pb.Tokens(
        index=emission.index,
        ids=emission.token_ids,
        chain=emission.chain,
        num_cached_tokens=emission.num_cached if is_first else None,
        choice=emission.key.choice,
        logprobs=_messages(emission.logprobs),
        prompt_logprobs=_messages(emission.prompt_logprobs),
    )


def _messages(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprobs] | None:
    """Return what a frame has for these; None for nothing: two empty iterables take 0.5 us of each token's 3."""
    return [logprobs_message(each) for each in logprobs] if logprobs else None


def _finished(live: Live, answer: Answer, emission: Emission) -> pb.Finished:
    assert emission.finish is not None
    assert answer.first_token_s is not None, f"{emission.key} has ended without a token"
    return pb.Finished(
        reason=emission.finish.value,
        num_generated=answer.num_generated,
        num_cached_tokens=emission.num_cached,
        choice=emission.key.choice,
        times=live.stages.times(answer.first_token_s),
    )
