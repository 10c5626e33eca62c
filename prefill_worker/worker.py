"""Wires a prefill worker: tasks to the engine, finished spans to the announcer, leases to the holdings."""

import asyncio
import logging

from common.lifecycle.epochs import new_epoch
from common.lifecycle.signals import StopSignals
from common.messages.ids import GatewayId
from common.messages.registry import Role, WorkerHealth
from common.runtime.edge import WorkerEdge
from common.runtime.foundation import Foundation, lay_foundation
from common.runtime.servicer import GatewayServicer
from common.runtime.staging import Staging
from common.runtime.standing import Tallies
from common.settings.worker import WorkerSettings
from prefill_worker.announcer import Announcer
from prefill_worker.core import Command, PrefillCore, SpanReady
from prefill_worker.holdings import Holding, Holdings
from prefill_worker.intake import Intake
from prefill_worker.limits import Limits
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.servicer import LeaseServicer, PrefillDesk
from prefill_worker.witness import Witness
from proto.worker_pb2_grpc import add_PrefillServicer_to_server, add_WorkerServicer_to_server

logger = logging.getLogger(__name__)

REAP_S = 0.5

MAX_RUNNING = 8
"""Prompts computed side by side: more would only make each first token later."""


class PrefillWorker:
    """One prefill worker process."""

    def __init__(self, settings: WorkerSettings, foundation: Foundation) -> None:
        self._settings = settings
        self._edge: WorkerEdge[Command, SpanReady] = WorkerEdge(settings, Role.PREFILL, foundation, self._lose_gateway)
        edge = self._edge
        self._witness = Witness(edge.worker, edge.metrics)
        self._holdings = Holdings(edge.submit, self._note_ended, edge.clock.now)
        edge.tallies = self._tally
        self._announcer = Announcer(
            foundation.epoch, edge.channels, edge.feeds, self._holdings, self._witness, settings.block_size
        )
        self._intake = Intake(
            edge.worker,
            foundation.epoch,
            foundation.fingerprint,
            edge.broker.tasks(foundation.fingerprint),
            edge.peers,
            edge.channels,
            self._holdings,
            edge.submit,
            self._announcer.follow,
            self._has_room,
            edge.grammars.prepare,
            edge.clock.now,
            Limits(foundation.checkpoint.config.vocab_size, foundation.max_context),
        )

    async def run(self, signals: StopSignals) -> int:
        """Serve until told to stop; returns the exit code."""
        edge = self._edge
        add_WorkerServicer_to_server(GatewayServicer(edge.foundation.epoch, edge.feeds, PrefillDesk()), edge.server)
        leases = LeaseServicer(edge.foundation.epoch, self._holdings, lambda: edge.is_stalled)
        add_PrefillServicer_to_server(leases, edge.server)
        try:
            await edge.register()
            await edge.load_model(self._core, self._announcer.deliver, self._intake.touch)
            edge.spawn(self._reap(), "reaper")
            edge.spawn(self._intake.watch_authors(), "author watch")
            edge.spawn(self._intake.sweep(), "sweeper")
            edge.spawn(self._intake.run(), "intake")
            code = await edge.serve(signals, lambda: self._intake.is_at_rest and not len(self._holdings))
            if code == 0:
                await self._announcer.hand_back()
            return code
        finally:
            self._holdings.end_all()
            await edge.leave()

    def _core(self, staging: Staging) -> PrefillCore:
        settings, foundation = self._settings, self._edge.foundation
        block_size = foundation.layout.block_size
        pool, prefix = foundation.make_cache()
        scheduler = PrefillScheduler(
            pool,
            prefix,
            block_size=block_size,
            token_budget=settings.token_budget,
            chunk_size=settings.chunk_size,
        )
        published_page = foundation.memory.page if settings.verify_pages else None
        return PrefillCore(scheduler, pool, staging, published_page)

    def _has_room(self) -> bool:
        load = self._edge.load
        is_open = self._edge.health is WorkerHealth.READY
        # Counted by bindings: the engine's load does not know yet what was claimed while a step runs.
        return is_open and load.num_waiting == 0 and self._holdings.num_computing < MAX_RUNNING

    def _tally(self) -> Tallies:
        holdings = self._holdings
        return Tallies(num_bindings=len(holdings), num_tries=holdings.num_made, num_stale=holdings.num_unknown)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            for holding in self._holdings.reap():
                logger.warning(
                    "lease over: %s let go", holding.author.worker, extra={"request_id": holding.task.request}
                )

    def _note_ended(self, holding: Holding) -> None:
        self._witness.ended(holding)
        self._intake.touch()

    def _lose_gateway(self, gateway: GatewayId) -> None:
        """Nothing is held for gateways: the decode workers cancel what theirs had asked for."""


async def run(settings: WorkerSettings) -> int:
    """Run a prefill worker until a signal ends it."""
    with StopSignals() as signals:
        foundation = await asyncio.to_thread(lay_foundation, settings, new_epoch())
        return await PrefillWorker(settings, foundation).run(signals)
