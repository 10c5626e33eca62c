"""The decode worker's ledger: one live placement per request, and tombstones for cancels that outrun their jobs."""

import msgspec

from common.messages.ids import ChoiceIndex, GatewayId, ModelName, PlacementNumber, RequestId
from common.messages.job import Job, OpenChoice
from common.messages.sampling import SamplingParams
from common.scheduling.sequence import PlacementKey
from decode_worker.ledger import MAX_TOMBSTONES, Ledger


def make_job(request: str = "r", placement: int = 1, gateway: str = "g") -> Job:
    return Job(
        request=RequestId(request),
        placement=PlacementNumber(placement),
        gateway=GatewayId(gateway),
        model=ModelName("m"),
        num_prompt_tokens=1,
        sampling=SamplingParams(seed=0, max_tokens=1),
        prompt=b"\x01\x00\x00\x00",
    )


def test_a_placement_is_found_by_its_own_key_only() -> None:
    ledger = Ledger()
    live = ledger.open(make_job(placement=2))
    assert ledger.get(live.key) is live
    assert ledger.get(PlacementKey(RequestId("r"), PlacementNumber(1))) is None
    assert ledger.close(PlacementKey(RequestId("r"), PlacementNumber(1))) is None
    assert ledger.close(live.key) is live
    assert ledger.close(live.key) is None
    assert len(ledger) == 0


def test_a_cancel_before_the_job_buries_it_and_older_ones() -> None:
    ledger = Ledger()
    ledger.bury(RequestId("r"), PlacementNumber(2))
    assert ledger.is_buried(make_job(placement=1))
    assert ledger.is_buried(make_job(placement=2))
    assert not ledger.is_buried(make_job(placement=3))
    assert not ledger.is_buried(make_job(request="other"))


def test_an_older_cancel_does_not_dig_up() -> None:
    ledger = Ledger()
    ledger.bury(RequestId("r"), PlacementNumber(2))
    ledger.bury(RequestId("r"), PlacementNumber(1))
    assert ledger.is_buried(make_job(placement=2))


def test_choices_that_were_cancelled_before_their_job_are_not_opened() -> None:
    ledger = Ledger()
    job = make_job(placement=2)
    three = msgspec.structs.replace(job, choices=tuple(OpenChoice(ChoiceIndex(choice)) for choice in range(3)))
    key = PlacementKey(RequestId("r"), PlacementNumber(2))
    ledger.bury_choice(key, ChoiceIndex(0))
    ledger.bury_choice(key, ChoiceIndex(2))
    assert not ledger.is_buried(three)
    assert ledger.is_buried(job)
    assert not ledger.is_buried(make_job(placement=3)), "the next placement has what is wanted then"
    assert ledger.open(three).open_choices == [1]


def test_choices_that_nobody_places_are_forgotten() -> None:
    ledger = Ledger()
    for number in range(MAX_TOMBSTONES + 1):
        ledger.bury_choice(PlacementKey(RequestId(str(number)), PlacementNumber(1)), ChoiceIndex(0))
    assert not ledger.is_buried(make_job(request="0"))
    assert ledger.is_buried(make_job(request="1"))


def test_tombstones_are_bounded() -> None:
    ledger = Ledger()
    for number in range(MAX_TOMBSTONES + 1):
        ledger.bury(RequestId(str(number)), PlacementNumber(1))
    assert not ledger.is_buried(make_job(request="0"))
    assert ledger.is_buried(make_job(request="1"))


def test_requests_of_one_gateway() -> None:
    ledger = Ledger()
    mine = ledger.open(make_job(request="a", gateway="g"))
    ledger.open(make_job(request="b", gateway="h"))
    assert ledger.of_gateway(GatewayId("g")) == [mine]
