"""Job queue over Redis: what to place where is decided in Lua, atomically over all gateways and workers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from common.broker import scripts
from common.broker.connection import RedisConnection, StreamVanished
from common.broker.demand import Demand
from common.broker.entries import sort_out
from common.broker.keys import Keys, escape
from common.broker.pipeline import Argument
from common.broker.policy import BrokerPolicy
from common.broker.pressure import crowded, heavy, late, tokens_per_s
from common.broker.protocols import (
    NO_CORRECTIONS,
    Candidate,
    Placed,
    QueuedJob,
    QueuePressure,
    Waiting,
    Whereabouts,
)
from common.errors import StalePlacement
from common.messages.codec import encode
from common.messages.ids import EntryId, Epoch, GatewayId, ModelName, PlacementNumber, RequestId, TenantId, WorkerId
from common.messages.job import Job
from common.messages.prefixes import NO_PREFIXES, PromptPrefixes

NUM_JOBS_PER_READ = 64


class RedisJobQueue:
    """Jobs of one model on their way from gateways to decode workers."""

    def __init__(self, connection: RedisConnection, model: ModelName, policy: BrokerPolicy) -> None:
        self._connection: Final = connection
        self._keys: Final = Keys(model)
        self._policy: Final = policy
        self._limits: Final = scripts.queue_limits(policy)

    async def place(
        self, job: Job, num_blocks: int, candidates: Sequence[Candidate], prefixes: PromptPrefixes = NO_PREFIXES
    ) -> Placed | Waiting:
        """Append the job to the stream of the cheapest candidate with room, else let it wait; see `JobQueue.place`.

        Raise `Overloaded` if it must not wait, `StalePlacement` if the placement was withdrawn or superseded.
        """
        demand = self._demand(job, Demand.of(job, num_blocks), prefixes.grain)
        arguments: tuple[Argument, ...] = (
            encode(job),
            demand,
            len(candidates),
            len(prefixes.names),
            *reversed(prefixes.names),
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
                case [b"crowded", wait_ms]:
                    raise crowded(self._policy, int(wait_ms) / 1000 if wait_ms else None)
                case [b"heavy", wait_ms]:
                    raise heavy(self._policy, int(wait_ms) / 1000 if wait_ms else None)
                case [b"late", wait_ms]:
                    raise late(self._policy, int(wait_ms) / 1000, self._policy.longest_foreseen_s(job.time_left_s))
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
        stream, held = self._keys.jobs(worker, epoch), self._keys.held(worker, epoch)
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

    async def beat_gateway(
        self, gateway: GatewayId, corrections: Mapping[TenantId, int] = NO_CORRECTIONS
    ) -> QueuePressure:
        """Renew the lease of a gateway and correct what its tenants were charged."""
        flat = [value for tenant, tokens in corrections.items() for value in (escape(tenant), tokens)]
        num_requests, num_tokens, *rate = await self._run(scripts.BEAT_GATEWAY, (gateway, *flat), ())
        busy_ms, tokens, jobs = rate
        return QueuePressure(num_requests, num_tokens, tokens_per_s(self._policy, busy_ms / 1000, tokens, jobs))

    def _demand(self, job: Job, demand: Demand, grain: int) -> bytes:
        """Return what `place.lua` calls a demand."""
        policy, time_left_s, max_foreseen_s = self._policy, job.time_left_s, self._policy.max_foreseen_s
        fields = {
            "request": job.request,
            "placement": job.placement,
            "gateway": job.gateway,
            "blocks": demand.num_blocks,
            "seats": demand.num_seats,
            "tokens": demand.num_tokens,
            "cost": demand.cost,
            "rank": demand.rank,
            "tenant": demand.tenant,
            "weight": demand.weight,
            "fingerprint": demand.fingerprint,
            "time_left": None if time_left_s is None else scripts.milliseconds(time_left_s),
            "age": scripts.milliseconds(job.age_s),
            "grain": grain,
            "max_foreseen": None if max_foreseen_s is None else scripts.milliseconds(max_foreseen_s),
            "max_requests": policy.max_waiting_requests,
            "max_tokens": policy.max_waiting_tokens,
            "known_after": scripts.milliseconds(policy.rate_known_after_s),
            "known_jobs": policy.rate_known_after_jobs,
        }
        return msgspec.msgpack.encode(fields)

    async def _run(
        self,
        script: scripts.Script,
        arguments: Sequence[Argument],
        lanes: Sequence[tuple[WorkerId, Epoch] | tuple[WorkerId, Epoch, float]],
    ) -> list[Any]:
        keys = [key for lane in lanes for key in self._keys.lane(lane[0], lane[1])]
        flat = [value for lane in lanes for value in lane]
        answer: list[Any] = await self._connection.run(
            script, (*self._keys.queue, *keys), *self._limits, *arguments, *flat
        )
        return answer
