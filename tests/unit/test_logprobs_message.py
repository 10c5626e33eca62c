"""Logprobs pass the wire as they are, in fp32."""

import math
import struct

import pytest

from common.errors import MalformedRecord
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_message, logprobs_of
from proto import worker_pb2 as pb


@pytest.mark.parametrize(
    "logprobs",
    [
        TokenLogprobs(-0.5),
        TokenLogprobs(0.0, ((7, 0.0),)),
        TokenLogprobs(-2.25, ((3, -0.125), (2**32 - 1, -0.125), (0, -80.5))),
        TokenLogprobs(-math.inf, ((1, 0.0), (2, -math.inf))),
    ],
)
def test_what_was_sent_is_read(logprobs: TokenLogprobs) -> None:
    message = pb.TokenLogprobs.FromString(logprobs_message(logprobs).SerializeToString())
    assert logprobs_of(message) == logprobs


def test_numbers_are_rounded_to_fp32() -> None:
    (rounded,) = struct.unpack("f", struct.pack("f", -1.1))
    assert logprobs_of(logprobs_message(TokenLogprobs(-1.1, ((5, -1.1),)))) == TokenLogprobs(rounded, ((5, rounded),))


def test_a_number_for_each_token() -> None:
    with pytest.raises(MalformedRecord, match="2 tokens have 1 numbers"):
        logprobs_of(pb.TokenLogprobs(logprob=-1.0, top_ids=[1, 2], top_logprobs=[-1.0]))


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("is_own", [True, False])
def test_no_number_is_no_logprob(number: float, is_own: bool) -> None:
    message = pb.TokenLogprobs(
        logprob=number if is_own else -1.0, top_ids=[1, 2], top_logprobs=[-1.0, -1.0 if is_own else number]
    )
    with pytest.raises(MalformedRecord, match="no logarithm"):
        logprobs_of(message)
