"""Wires a decode worker: engine events to gateways, jobs to the engine, prefill workers to the receiver."""

import asyncio
import logging
from typing import assert_never, cast

from common.cache.journal import PrefixJournal
from common.lifecycle.epochs import new_epoch
from common.lifecycle.signals import StopSignals
from common.messages.ids import GatewayId
from common.messages.registry import Role, WorkerRecord
from common.runtime.edge import WorkerEdge
from common.runtime.foundation import Foundation, lay_foundation
from common.runtime.prefix_teller import PrefixTeller
from common.runtime.servicer import GatewayServicer
from common.runtime.staging import Staging
from common.runtime.standing import Tallies
from common.scheduling.emission import Emission
from common.scheduling.pace import TwinMeter
from common.settings.worker import WorkerSettings
from common.transfer.host import host_id
from common.transfer.puller import Puller, PullReport, TransferMode
from decode_worker.claimers import Claimers
from decode_worker.core import Begun, Command, DecodeCore, Displaced, Event, LetGo, Placed, Refused, Reserved, Unstarted
from decode_worker.emitter import Emitter
from decode_worker.fetcher import Fetcher
from decode_worker.intake import Intake
from decode_worker.ledger import Ledger, Live
from decode_worker.limits import Limits
from decode_worker.placing import Bounds, Place, Placing, There, prompt_allowance
from decode_worker.quotes import Quotes
from decode_worker.receiver import Author, Receiver
from decode_worker.releases import Leases, Releases
from decode_worker.retirements import Retirements
from decode_worker.scheduler import DecodeScheduler
from decode_worker.servicer import HandoverServicer
from decode_worker.witness import Witness
from proto.worker_pb2_grpc import add_DecodeServicer_to_server, add_WorkerServicer_to_server

logger = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker process."""

    def __init__(self, settings: WorkerSettings, foundation: Foundation) -> None:
        self._settings = settings
        self._edge: WorkerEdge[Command, Event] = WorkerEdge(settings, Role.DECODE, foundation, self._lose_gateway)
        edge = self._edge
        self._witness = Witness(edge.worker, edge.metrics)
        self._ledger = Ledger(self._witness.closed)
        self._emitter = Emitter(edge.feeds, self._ledger)
        mode = cast(TransferMode, settings.transfer)  # one of its choices
        self._quotes = Quotes(edge.peers, foundation.layout.token_bytes, edge.clock.now)
        self._puller = Puller(foundation.memory, settings.secret, host_id(), mode, self._note_pull)
        self._releases = Releases(edge.channels, foundation.epoch)
        tasks = edge.broker.tasks(foundation.fingerprint)
        self._retirements = Retirements(tasks)
        self._receiver = Receiver(
            Author(edge.worker, foundation.epoch),
            tasks,
            edge.peers,
            Fetcher(self._puller, foundation.memory.page),
            self._releases,
            self._retirements,
            edge.submit,
            self._emitter,
            self._witness,
            edge.clock.now,
            self._probe,
            Claimers(
                tasks, edge.peers, edge.channels, edge.worker, foundation.epoch, settings.lease_s, edge.clock.now
            ).is_gone,
        )
        edge.tallies = self._tally
        self._journal = PrefixJournal()
        self._leases = Leases(
            edge.channels,
            edge.worker,
            foundation.epoch,
            settings.lease_s,
            self._receiver.attempts,
            self._is_listed,
            edge.clock.now,
        )
        limits = Limits(foundation.checkpoint.config.vocab_size, foundation.max_context, settings.max_sequences)
        self._intake = Intake(
            edge.broker.jobs,
            self._ledger,
            self._emitter,
            edge.submit,
            self._receiver.drop,
            self._may_go_remote,
            self._there,
            limits,
            edge.grammars.when_ready,
            self._witness.placed,
            edge.clock.now,
        )

    async def run(self, signals: StopSignals) -> int:
        """Serve until told to stop; returns the exit code."""
        edge = self._edge
        foundation = edge.foundation
        self._handover = HandoverServicer(
            self._receiver,
            self._retirements,
            edge.peers,
            foundation.fingerprint,
            self._settings.lease_s,
            self._witness,
            foundation.checkpoint.config.vocab_size,
        )
        add_WorkerServicer_to_server(GatewayServicer(foundation.epoch, edge.feeds, self._intake), edge.server)
        add_DecodeServicer_to_server(self._handover, edge.server)
        try:
            await edge.register()
            await edge.load_model(self._core, self._take)
            intake = edge.spawn(self._intake.run(edge.worker, foundation.epoch), "intake")
            edge.spawn(self._leave(signals), "leaving")
            edge.spawn(self._releases.run(), "releases")
            edge.spawn(self._leases.run(), "leases")
            edge.spawn(self._retirements.run(), "retirements")
            teller = PrefixTeller(edge.broker.prefixes, edge.worker, foundation.epoch, self._journal)
            edge.spawn(teller.run(), "prefixes")
            code = await edge.serve(signals, lambda: not len(self._ledger))
            intake.cancel()
            await asyncio.gather(intake, return_exceptions=True)
            await self._intake.hand_back_unread(edge.worker, foundation.epoch)
            for live in self._ledger.all():
                if code and live.prompt is not None:  # the engine had it: it may be what the engine has failed over
                    self._intake.abandon(live)
                else:
                    self._intake.hand_back(live)
            return code
        finally:
            await self._receiver.close()
            await self._releases.flush()
            await edge.leave()
            await self._puller.close()

    def _core(self, staging: Staging) -> DecodeCore:
        settings, foundation = self._settings, self._edge.foundation
        block_size = foundation.layout.block_size
        pool, prefix = foundation.make_cache(self._journal)
        pace = TwinMeter()
        bounds = Bounds(settings.chunk_size, settings.token_budget, settings.itl_target_ms / 1000)
        scheduler = DecodeScheduler(
            pool,
            prefix,
            block_size=block_size,
            max_sequences=settings.max_sequences,
            token_budget=settings.token_budget,
            chunk_size=settings.chunk_size,
            max_context=foundation.max_context,
            prompt_allowance=lambda decoding, pairs, context: prompt_allowance(
                pace.cost, decoding, pairs, context, bounds
            ),
        )
        local_max = 0 if settings.disaggregation == "always" else settings.local_prefill_max_tokens
        placing = Placing(bounds, local_max, is_measured=settings.disaggregation == "auto")
        return DecodeCore(scheduler, pool, prefix, block_size, placing, staging, pace)

    def _probe(self) -> None:
        self._leases.probe()

    def _is_listed(self, source: WorkerRecord) -> bool:
        return self._edge.peers.find(source.worker, source.epoch) is not None

    def _tally(self) -> Tallies:
        return self._witness.tallies(len(self._receiver.attempts()))

    def _may_go_remote(self) -> bool:
        return self._settings.disaggregation != "never" and bool(self._edge.peers.ready(Role.PREFILL))

    def _there(self) -> There | None:
        return self._quotes.there() if self._settings.disaggregation == "auto" else None

    def _note_pull(self, report: PullReport) -> None:
        self._witness.pulled(report)
        self._quotes.pulled(report)

    def _take(self, event: Event) -> None:
        match event:
            case Emission():
                self._emit(event)
            case Reserved():
                self._receive(event)
            case _:
                live = self._ledger.get(event.key.of_placement)
                if live is not None:
                    self._note(live, event)

    def _note(self, live: Live, event: Placed | Begun | Displaced | Unstarted | Refused) -> None:
        match event:
            case Placed(decision=decision):
                self._witness.decided(live, decision)
                self._quotes.sent(decision)
            case Begun():
                live.stages.begin()
            case Displaced():
                self._intake.displace(live)
            case Unstarted():
                self._intake.hand_back(live)
            case Refused(reason=reason):
                self._emitter.failed(live, "too_long", reason, is_retryable=False)
                self._intake.close(live.key)
            case _:
                assert_never(event)

    def _receive(self, reserved: Reserved) -> None:
        live = self._ledger.get(reserved.key.of_placement)
        answer = None if live is None else live.open_answer(reserved.key.choice)
        if live is None or live.prompt is None or answer is None:  # cancelled: nobody receives into the lent pages
            self._edge.submit(LetGo(reserved.key))
            return
        live.prefilling_ns = None
        live.stages.begin()
        self._receiver.begin(live, live.prompt + answer.shown, reserved)

    def _emit(self, emission: Emission) -> None:
        live = self._ledger.get(emission.key.of_placement)
        is_first = live is not None and live.decoding_ns is None
        ended = self._emitter.emit(emission)
        if live is not None and is_first and live.decoding_ns is not None:
            self._note_first_token(live)
        if ended is not None:
            self._intake.close(ended.key)

    def _note_first_token(self, live: Live) -> None:
        duration_s, decision = self._witness.prefilled(live), live.decision
        if decision is None:
            return
        if duration_s is None:
            self._quotes.missed(decision)
        elif decision.place is Place.THERE:
            self._quotes.handed_over(decision, duration_s)

    async def _leave(self, signals: StopSignals) -> None:
        await signals.stop.wait()
        self._intake.leave()

    def _lose_gateway(self, gateway: GatewayId) -> None:
        self._intake.cancel_gateway(gateway)


async def run(settings: WorkerSettings) -> int:
    """Run a decode worker until a signal ends it."""
    with StopSignals() as signals:
        foundation = await asyncio.to_thread(lay_foundation, settings, new_epoch())
        return await DecodeWorker(settings, foundation).run(signals)
