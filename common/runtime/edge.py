"""The edge of a worker process, the same for both roles: listeners, feeds, peers, heartbeat and the engine thread.

A worker is composed of this and of what its role adds (`decode_worker.worker`, `prefill_worker.worker`). Everything
here belongs to the event loop, except the insides of the engine thread.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from prometheus_client import CollectorRegistry

from common.broker.redis_broker import RedisBroker
from common.lifecycle.awake_clock import AwakeClock
from common.lifecycle.core_board import CoreBoard
from common.lifecycle.garbage import settle
from common.lifecycle.signals import StopSignals
from common.messages.ids import GatewayId, WorkerId
from common.messages.registry import Role, WorkerHealth, WorkerLoad, WorkerRecord
from common.rpc.channels import Channels
from common.rpc.server import bind, make_server
from common.runtime.engine import Core, EngineLoad, EngineThread, StepReport
from common.runtime.feeds import FeedHub
from common.runtime.foundation import Foundation
from common.runtime.grammar_masks import GrammarMasks
from common.runtime.grammars import Grammars
from common.runtime.heart import Heart
from common.runtime.model_loading import LoadedModel, load_model
from common.runtime.peers import Peers
from common.runtime.runner import ModelRunner, allocate_pages
from common.runtime.staging import HostStaging, NoStaging, Staging
from common.runtime.stall import Verdict, watch_engine
from common.runtime.standing import Standing, Tallies
from common.runtime.warm_up import warm_up
from common.settings.worker import WorkerSettings
from common.telemetry.endpoint import HealthReport, HealthServer
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.traces import flush_tracing
from common.telemetry.vllm_names import alias_worker
from common.transfer.pool_source import PoolSource
from kernels.decoder.op import BorrowedCores

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


STOP_S = 10.0
"""How long the engine may take to finish its step when the worker leaves."""

STALLED_STOP_S = 0.5

LONGEST_TICK_S = 0.5
"""However long a lease is, a pause of three ticks is noticed: by the clock run also the grace of a gateway and the wait
for a prompt, which are 5 s. A gateway notices pauses of the same length."""


def _ignore() -> None:
    """Nobody wants to know."""


CPU_NICENESS = 5
"""An engine takes every moment of every core it has. By this a gateway that wants the same one gets three quarters of
it. But so does a foreign process in the same scheduling group: beside one per core a prompt of 900 tokens took 24 s
instead of 6; with 10 the workers counted as stalled, and it was refused."""


class WorkerEdge(Generic[CommandT, EventT]):
    """Life: constructed -> `register` (visible, loading) -> `load_model` -> `serve` -> `leave`."""

    def __init__(
        self,
        settings: WorkerSettings,
        role: Role,
        foundation: Foundation,
        on_gateway_lost: Callable[[GatewayId], None],
    ) -> None:
        self.settings = settings
        self.role = role
        self.foundation = foundation
        self.worker = WorkerId(settings.worker_id or f"{role}-{os.uname().nodename}")
        self.metrics = WorkerMetrics(CollectorRegistry())
        if settings.vllm_metrics:
            alias_worker(self.metrics, foundation.model)
        self.broker = RedisBroker.connect(settings.redis_url or "", foundation.model)
        lease_s = settings.lease_s
        self.clock = AwakeClock(
            tick_s=min(LONGEST_TICK_S, lease_s / 24),
            tolerance_s=min(2 * LONGEST_TICK_S, lease_s / 12),
            settle_s=lease_s / 6,
        )
        """By it the worker lets others expire; after a pause it waits for the next renewal of their leases."""
        self.peers = Peers(self.broker.registry, foundation.fingerprint, self.clock, lease_s)
        self.channels = Channels(settings.secret)
        self.server = make_server(settings.secret)
        self.feeds = FeedHub(on_gateway_lost, clock=self.clock.now)
        self.tallies: Callable[[], Tallies] = Tallies
        """Asks the role's own part of the worker for its counts; heartbeat and metrics carry them."""
        self.grammars = Grammars(foundation.card)
        self._standing = Standing(EngineLoad(foundation.num_blocks, foundation.num_blocks, 0))
        self._board: CoreBoard | None = None
        if settings.core_board is not None:
            self._board = CoreBoard(settings.core_board, settings.cpus, settings.borrowed_cpus)
        self.engine: EngineThread[CommandT, EventT] | None = None
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._sources = PoolSource(
            foundation.memory,
            settings.secret,
            settings.host,
            advertised_host=settings.reachable_host,
            socket=None if settings.transfer == "tcp" else self._socket_path(),
        )
        self._health_server = HealthServer(self.metrics.registry, self._report)
        self._heart: Heart | None = None
        self._model: LoadedModel | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def health(self) -> WorkerHealth:
        """What others are told about the worker's life."""
        return self._standing.health

    @property
    def is_stalled(self) -> bool:
        """Whether the engine makes no progress with the work that it has."""
        return self._standing.is_stalled

    @property
    def load(self) -> EngineLoad:
        """How full the engine was when it reported last."""
        return self._standing.load

    async def register(self) -> None:
        """Open the listeners and appear in the registry as loading."""
        settings, foundation = self.settings, self.foundation
        port = bind(self.server, settings.host, settings.port)
        endpoint = await self._sources.start()
        await self.server.start()
        metrics_port = await self._health_server.start(settings.host, settings.metrics_port)
        record = WorkerRecord(
            worker=self.worker,
            role=self.role,
            epoch=foundation.epoch,
            model=foundation.model,
            fingerprint=foundation.fingerprint,
            address=f"{settings.reachable_host}:{settings.advertise_port or port}",
            pid=os.getpid(),
            num_blocks=foundation.num_blocks,
            block_size=foundation.layout.block_size,
            max_context=foundation.max_context,
            max_sequences=settings.max_sequences,
            transfer=endpoint,
            metrics_address=f"{settings.reachable_host}:{metrics_port}",
        )
        self._heart = Heart(
            self.broker.registry,
            record,
            foundation.card,
            self._worker_load,
            self.clock,
            self.metrics.broker_reconnects.inc,
        )
        self.spawn(self.clock.run(), "clock")
        self.spawn(self._heart.run(), "heart")
        self.spawn(self.peers.watch(), "peers")

    async def load_model(
        self,
        make_core: Callable[[Staging], Core[CommandT, EventT]],
        on_event: Callable[[EventT], None],
        on_load: Callable[[], None] = _ignore,
    ) -> None:
        """Load the weights, start the engine and let it warm up; from then on the worker is ready, if nothing failed.

        `on_load` is called when the engine's load or the worker's health has changed.
        """
        model = self._model = await asyncio.to_thread(self._load_weights, asyncio.get_running_loop())
        pages, staging = self._allocate()
        await asyncio.to_thread(self.grammars.load)
        masks = GrammarMasks(self.grammars)
        runner = ModelRunner(model, pages, self.foundation.layout.block_size, masks)
        foundation, warm = self.foundation, asyncio.Event()
        prelude = partial(warm_up, runner, foundation.layout.block_size, foundation.max_context)
        core = make_core(staging)
        self.engine = engine = EngineThread(core, runner, self._engine_niceness(), prelude, self._board)

        def take_verdict(verdict: Verdict) -> None:
            self._note_verdict(verdict)
            on_load()

        def take_report(report: StepReport[EventT]) -> None:
            warm.set()
            try:
                for event in report.events:
                    on_event(event)
                if self._note(report):
                    on_load()
            except Exception as error:  # root of a callback: the events behind this one would be lost in silence
                logger.exception("an event of the engine could not be handled")
                self._note_crash(error)

        engine.start(asyncio.get_running_loop(), take_report, self._note_crash)
        if not await self._comes_before_a_crash(warm):
            return
        watch = watch_engine(lambda: engine.progress, self.settings.stall_s, self.clock.now, take_verdict)
        self.spawn(watch, "stall watch")
        settle()  # a look at all that the tensor library consists of stops engine and event loop for half a second
        self._standing.phase = WorkerHealth.READY
        self.touch()

    async def _comes_before_a_crash(self, event: asyncio.Event) -> bool:
        waiting = asyncio.ensure_future(event.wait())
        futures: set[asyncio.Future[Any]] = {waiting, self.crashed}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return not self.crashed.done()

    def submit(self, command: CommandT) -> None:
        """Give the engine a command; before it runs there is nothing to command."""
        if self.engine is not None:
            self.engine.submit(command)

    def touch(self) -> None:
        """Tell the registry about a change soon."""
        if self._heart is not None:
            self._heart.touch()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a loop of the worker until it leaves; one that fails ends the worker."""
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._note_end)
        return task

    async def serve(self, signals: StopSignals, is_idle: Callable[[], bool]) -> int:
        """Work until a signal, then drain: no new work, running work finished. Returns the exit code."""
        stop = asyncio.ensure_future(signals.stop.wait())
        futures: set[asyncio.Future[Any]] = {stop, self.crashed}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self.crashed.done():
            logger.error("leaving after a failure: %r", self.crashed.result())
            return 1
        self._standing.phase = WorkerHealth.DRAINING
        if self._heart is not None:
            await self._heart.beat()  # once it is answered nothing more is placed here
        await self._drain(signals, is_idle)
        return 1 if self.crashed.done() else 0

    async def leave(self) -> None:
        """Leave the registry, then close everything."""
        for task in self._tasks:
            task.remove_done_callback(self._note_end)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.grammars.close()
        if self._heart is not None:
            await self._heart.leave()
        await self.server.stop(grace=0.5)
        await self._sources.close()
        await self._health_server.close()
        if self.engine is not None:
            patience_s = STALLED_STOP_S if self.is_stalled else STOP_S
            await asyncio.to_thread(self.engine.stop, patience_s)
        await self.channels.close()
        await self.broker.close()
        if self._model is not None:
            self._model.close()
        await asyncio.to_thread(flush_tracing)

    def _allocate(self) -> tuple[torch.Tensor, Staging]:
        """Return the pages that the model computes in and the way between them and those that peers reach."""
        foundation = self.foundation
        host_pages = allocate_pages(foundation.layout, foundation.num_blocks, foundation.memory.pages)
        if foundation.device.type == "cpu":
            return host_pages, NoStaging()
        pages = allocate_pages(foundation.layout, foundation.num_blocks, device=foundation.device)
        return pages, HostStaging(pages, host_pages)

    def _engine_niceness(self) -> int:
        told = self.settings.engine_niceness
        if told is not None:
            return told
        return CPU_NICENESS if self.foundation.device.type == "cpu" else 0  # for a GPU the thread only has to be quick

    def _load_weights(self, loop: asyncio.AbstractEventLoop) -> LoadedModel:
        def tell(fraction: float) -> None:  # called in the loading thread
            loop.call_soon_threadsafe(self._note_progress, fraction)

        borrowed = None if self._board is None else BorrowedCores(self._board.borrowed, self._board)
        return load_model(self.foundation, self.settings, tell, borrowed)

    def _note_progress(self, fraction: float) -> None:
        self._standing.loading_fraction = fraction
        self.touch()

    def _note(self, report: StepReport[EventT]) -> bool:
        has_changed = report.load != self.load
        self.metrics.preemptions.inc(report.load.num_preemptions - self.load.num_preemptions)
        self.metrics.prefill_tokens.inc(report.num_prompt_tokens)
        self._standing.load = report.load
        self.feeds.num_steps = report.load.num_steps
        self.metrics.note_step(report.step_s, report.num_tokens)
        self._worker_load()
        if has_changed:
            self.touch()
        return has_changed

    def _note_verdict(self, verdict: Verdict) -> None:
        """Tell everybody what has become of the engine's progress."""
        is_stalled = verdict is not Verdict.MOVING
        if verdict is Verdict.HOPELESS:
            self._note_crash(TimeoutError("the engine makes no progress: a fresh process is needed"))
        elif is_stalled:
            logger.error("the engine has finished nothing for %.1f s", self.settings.stall_s)
        else:
            logger.warning("the engine makes progress again")
        self._standing.is_stalled = is_stalled
        self.feeds.tell_stalled(is_stalled)
        self._worker_load()
        self.touch()

    def _note_crash(self, error: BaseException) -> None:
        if not self.crashed.done():
            self.crashed.set_result(error)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self._note_crash(error)

    async def _drain(self, signals: StopSignals, is_idle: Callable[[], bool]) -> None:
        hurry = asyncio.create_task(signals.hurry.wait())
        try:
            async with asyncio.timeout(self.settings.drain_s):
                while not (is_idle() or hurry.done() or self.crashed.done()):
                    await asyncio.wait({hurry}, timeout=0.05)
        except TimeoutError:
            logger.warning("work is left after %.0f s of draining", self.settings.drain_s)
        finally:
            hurry.cancel()

    def _worker_load(self) -> WorkerLoad:
        """Return what the heartbeat carries, and let the gauges show the same."""
        load = self._standing.worker_load(self.tallies())
        self.metrics.note_load(load)
        return load

    def _report(self) -> HealthReport:
        if self._heart is None or not self._heart.is_connected:
            return HealthReport(is_ready=False, reason="the registry does not answer")
        return HealthReport(is_ready=self.health is WorkerHealth.READY, reason=str(self.health))

    def _socket_path(self) -> Path:
        folder = self.settings.socket_dir or Path(tempfile.mkdtemp(prefix="tandem-"))
        return folder / f"{self.worker}.sock"
