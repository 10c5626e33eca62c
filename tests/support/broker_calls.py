"""The calls that broker tests make again and again, with only the arguments that a test is about."""

from common.broker.protocols import Candidate, Placed, Waiting
from common.messages.ids import EntryId, Epoch, PlacementNumber, RequestId, WorkerId
from tests.support.broker_harness import Broker
from tests.support.broker_records import D0, EPOCH, make_job


def candidate(worker: WorkerId = D0, epoch: int = EPOCH, cost: float = 0.0) -> Candidate:
    """Return a decode worker to choose from."""
    return Candidate(worker, Epoch(epoch), cost)


ONLY_D0 = [candidate()]


async def place(
    broker: Broker, request: str, num_blocks: int = 10, *candidates: Candidate, placement: int = 1
) -> Placed | Waiting:
    """Place a request on one of the candidates, `D0` if there are none."""
    return await broker.jobs.place(make_job(request, placement), num_blocks, candidates or (candidate(),))


async def read(broker: Broker, worker: WorkerId = D0, epoch: int = EPOCH, after: EntryId | None = None) -> list[str]:
    """Return the requests in a worker's stream."""
    return [queued.job.request for queued in await broker.jobs.read(worker, Epoch(epoch), after, 0.0)]


async def last_entry(broker: Broker, worker: WorkerId = D0) -> EntryId:
    """Return the newest entry of a worker's stream."""
    return (await broker.jobs.read(worker, EPOCH, None, 0.0))[-1].entry


async def where(broker: Broker, request: str, placement: int = 1) -> str:
    """Return where a placement is."""
    return await broker.jobs.whereabouts(RequestId(request), PlacementNumber(placement))


async def withdraw(broker: Broker, request: str, placement: int = 1) -> None:
    """Withdraw a placement and older ones."""
    await broker.jobs.withdraw(RequestId(request), PlacementNumber(placement))
