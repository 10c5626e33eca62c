"""Logprobs on the wire: every process that sends or reads them does it here."""

import math

from common.errors import MalformedRecord
from common.messages.logprobs import TokenLogprobs
from proto import worker_pb2 as pb


def logprobs_message(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """Return the message that `logprobs_of` reads; numbers become fp32."""
    ids, numbers = zip(*logprobs.top, strict=True) if logprobs.top else ((), ())
    return pb.TokenLogprobs(logprob=logprobs.logprob, top_ids=ids, top_logprobs=numbers)


def logprobs_of(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Return what a message says; raise `MalformedRecord` if it has not one number for each of its tokens, or one that
    is none."""
    ids, numbers = message.top_ids, message.top_logprobs
    if len(ids) != len(numbers):
        raise MalformedRecord("logprobs", f"{len(ids)} tokens have {len(numbers)} numbers")
    if not all(number < math.inf for number in (message.logprob, *numbers)):
        raise MalformedRecord("logprobs", "one is no logarithm of a probability")
    return TokenLogprobs(message.logprob, tuple(zip(ids, numbers, strict=True)))
