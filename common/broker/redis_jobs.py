"""Job queue over Redis: what to place where is decided in Lua, atomically over all gateways and workers."""

from collections.abc import Sequence
from typing import Any, Final

from common.broker import scripts
from common.broker.connection import Argument, RedisConnection, StreamVanished
from common.broker.entries import sort_out
from common.broker.keys import Keys
from common.broker.policy import BrokerPolicy
from common.broker.protocols import Candidate, Placed, QueuedJob, Waiting, Whereabouts
from common.errors import Overloaded, StalePlacement
from common.messages.codec import encode
from common.messages.ids import EntryId, Epoch, GatewayId, ModelName, PlacementNumber, RequestId, WorkerId
from common.messages.job import Job

NUM_JOBS_PER_READ = 64


class RedisJobQueue:
    """Jobs of one model on their way from gateways to decode workers."""

    def __init__(self, connection: RedisConnection, model: ModelName, policy: BrokerPolicy) -> None:
        self._connection: Final = connection
        self._keys: Final = Keys(model)
        self._policy: Final = policy

    async def place(self, job: Job, num_blocks: int, candidates: Sequence[Candidate]) -> Placed | Waiting:
        """Append the job to the stream of the cheapest candidate with room for `num_blocks`, else let it wait.

        Raise `Overloaded` if the waiting set is full, `StalePlacement` if the placement was withdrawn or superseded.
        """
        arguments: tuple[Argument, ...] = (
            encode(job),
            job.request,
            job.placement,
            job.gateway,
            num_blocks,
            self._policy.max_waiting,
            "" if job.time_left_s is None else scripts.milliseconds(job.time_left_s),
            len(candidates),
        )
        lanes = [(candidate.worker, candidate.epoch, candidate.cost) for candidate in candidates]
        while True:
            match await self._run(scripts.PLACE, arguments, lanes):
                case [b"placed", worker, epoch]:
                    return Placed(WorkerId(worker.decode()), Epoch(int(epoch)))
                case [b"waiting", num_ahead]:
                    return Waiting(num_ahead)
                case [b"elsewhere", worker, epoch]:
                    lanes = [*lanes[: len(candidates)], (WorkerId(worker.decode()), Epoch(int(epoch)), 0.0)]
                case [b"full"]:
                    raise Overloaded("The waiting queue is full.", retry_after_s=self._policy.retry_after_s)
                case _:
                    raise StalePlacement(job.request, job.placement)

    async def withdraw(self, request: RequestId, placement: PlacementNumber) -> None:
        """Remove the placement and older ones of that request; a place of them that arrives later is refused."""
        lanes: list[tuple[WorkerId, Epoch]] = []
        while True:
            answer = await self._run(scripts.WITHDRAW, (request, placement), lanes)
            if answer[0] == b"done":
                return
            lanes = [(WorkerId(answer[1].decode()), Epoch(int(answer[2])))]

    async def whereabouts(self, request: RequestId, placement: PlacementNumber) -> str:
        """Return one of the `Whereabouts` constants."""
        keys = (self._keys.workers, self._keys.places)
        match await self._connection.run(scripts.WHEREABOUTS, keys, request, placement):
            case [b"waiting"]:
                return Whereabouts.WAITING
            case [b"placed", worker, epoch, entry]:
                held = self._keys.held(WorkerId(worker.decode()), Epoch(int(epoch)))
                if await self._connection.call("HEXISTS", held, entry):
                    return Whereabouts.PLACED
        return Whereabouts.UNKNOWN

    async def read(self, worker: WorkerId, epoch: Epoch, after: EntryId | None, block_s: float) -> list[QueuedJob]:
        """Return jobs addressed to that incarnation behind `after`, waiting up to `block_s` for the first one."""
        stream, held = self._keys.lane(worker, epoch)
        try:
            reply = await self._connection.read(
                block_s, "XREAD", "COUNT", NUM_JOBS_PER_READ, streams=(stream, after or "0-0")
            )
        except StreamVanished:  # deleted under the blocked read
            return []
        readable, malformed = sort_out(reply[0][1] if reply else [], "job", Job)
        for entry in malformed:
            await self._connection.call("XDEL", stream, entry)
            await self._connection.call("HDEL", held, entry)
        return [QueuedJob(entry, job) for entry, job in readable]

    async def beat_gateway(self, gateway: GatewayId) -> None:
        """Renew the lease of a gateway."""
        await self._run(scripts.BEAT_GATEWAY, (gateway,), ())

    async def _run(
        self,
        script: scripts.Script,
        arguments: Sequence[Argument],
        lanes: Sequence[tuple[WorkerId, Epoch, *tuple[float, ...]]],
    ) -> list[Any]:
        keys = [key for worker, epoch, *_ in lanes for key in self._keys.lane(worker, epoch)]
        flat = [value for lane in lanes for value in lane]
        answer: list[Any] = await self._connection.run(
            script, (*self._keys.queue, *keys), *scripts.queue_limits(self._policy), *arguments, *flat
        )
        return answer
