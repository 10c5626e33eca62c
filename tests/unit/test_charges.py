"""What requests are expected to cost, and what their tenants are charged in the end."""

from common.messages.ids import ModelName, TenantId
from common.messages.sampling import SamplingParams
from gateway.charges import Charges
from gateway.engine import GenerateRequest
from gateway.streams import Stream
from tests.support.stream_events import DECODE, accepted, finished, tokens

MODEL = ModelName("m")


def make_stream(charges: Charges, *, max_tokens: int = 1000, num_choices: int = 1, tenant: str = "t") -> Stream:
    """Return a request that has been placed once."""
    request = GenerateRequest(
        finished(1).request,  # type: ignore[arg-type]  # a text
        MODEL,
        range(50),
        SamplingParams(seed=1, max_tokens=max_tokens),
        num_choices=num_choices,
        tenant=TenantId(tenant),
    )
    stream = Stream(request, 3)
    stream.begin_placement()
    stream.cost = charges.expected(stream)
    return stream


def test_an_answer_is_expected_to_be_as_long_as_others_or_as_it_may() -> None:
    charges = Charges()
    assert make_stream(charges).cost == 50 + 256
    assert make_stream(charges, max_tokens=10, num_choices=3).cost == 50 + 3 * 10
    for _ in range(500):
        short = make_stream(charges, max_tokens=2)
        for event in (accepted(), tokens(0, [7, 8], []), finished(2)):
            assert short.take(DECODE, event)
        charges.settle(short)
    assert make_stream(charges).cost == 52


def test_the_difference_is_corrected_once() -> None:
    charges = Charges()
    for tenant in ("a", "a", "b"):
        stream = make_stream(charges, tenant=tenant)
        for event in (accepted(), tokens(0, [7, 8], []), finished(2)):
            assert stream.take(DECODE, event)
        charges.settle(stream)
    a, b = TenantId("a"), TenantId("b")
    corrections = charges.take(MODEL)
    assert set(corrections) == {a, b}
    assert corrections[b] <= -240
    assert corrections[a] < corrections[b]
    assert not charges.take(MODEL)


def test_what_nobody_was_given_was_not_charged() -> None:
    charges = Charges()
    charges.settle(make_stream(charges))
    assert not charges.take(MODEL)
