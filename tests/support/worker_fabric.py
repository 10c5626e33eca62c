"""Whole workers in this process: their real wiring, servers, schedulers and engine threads, over the broker in memory,
in-process page transfer and a runner without a model.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import pytest
import torch

import decode_worker.receiver
import decode_worker.worker
import prefill_worker.worker
from common.broker.memory_broker import MemoryBroker
from common.lifecycle.signals import StopSignals
from common.messages.ids import Epoch
from common.messages.registry import ModelCard, Role, WorkerHealth, WorkerRecord
from common.model.checkpoint import Checkpoint
from common.runtime import edge as edge_module
from common.runtime import heart, peers
from common.runtime.edge import WorkerEdge
from common.runtime.feeds import FeedHub
from common.runtime.foundation import Foundation
from common.settings.worker import WorkerSettings
from common.transfer.memory import InProcessTransfer
from common.transfer.pool_memory import PoolMemory
from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.support.broker_records import FINGERPRINT, MODEL, make_card
from tests.support.feed_client import FeedClient
from tests.support.polling import until
from tests.support.slow_puller import SlowPuller
from tests.support.tagged_pages import BLOCK_SIZE, LAYOUT, VOCABULARY, TaggedRunner
from tests.support.valve import Valve

SECRET = "correct horse battery staple"
GRACE_S = 0.1
MAX_CONTEXT = 128
CHUNK_SIZE = 8

WorkerT = TypeVar("WorkerT", DecodeWorker, PrefillWorker)


@dataclass
class Node(Generic[WorkerT]):
    """A worker and the controls of its engine."""

    worker: WorkerT
    task: asyncio.Task[int]
    signals: StopSignals
    valve: Valve
    record: WorkerRecord = field(init=False)
    """The worker's row of the registry."""

    @property
    def edge(self) -> WorkerEdge[Any, Any]:
        """The worker's edge."""
        return self.worker._edge

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a page."""
        load = self.edge.load
        is_at_rest = load.num_running + load.num_waiting + load.num_reserved == 0
        return is_at_rest and load.blocks_free == load.blocks_total

    async def stop(self) -> int:
        """Leave without finishing anything; return the exit code."""
        self.valve.open()
        self.signals.hurry.set()
        self.signals.stop.set()
        return await self.task

    async def kill(self) -> None:
        """Vanish like a killed process: nobody is told, and the registry still has the row."""
        edge = self.edge
        edge._heart, edge._tasks = None, [_cancelled(task) for task in edge._tasks]
        await edge.server.stop(None)
        await edge._sources.close()
        await edge.channels.close()
        self.valve.open()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Fabric:
    """One cluster of one model. Blocks have 4 tokens, a step computes 8 tokens of a prompt."""

    broker: MemoryBroker
    transfer: InProcessTransfer = field(default_factory=InProcessTransfer)
    nodes: list[Node[Any]] = field(default_factory=list)
    clients: list[FeedClient] = field(default_factory=list)

    async def decode(self, name: str = "decode-0", **options: Any) -> Node[DecodeWorker]:
        """Start a decode worker that prefills nothing itself while there is a prefill worker."""
        return await self._start(DecodeWorker, name, options)

    async def prefill(self, name: str = "prefill-0", **options: Any) -> Node[PrefillWorker]:
        """Start a prefill worker."""
        return await self._start(PrefillWorker, name, options)

    async def pair(self) -> tuple[Node[DecodeWorker], Node[PrefillWorker], FeedClient]:
        """Start a worker of each role and a gateway that is connected to both."""
        decode, prefill = await self.decode(), await self.prefill()
        client = await self.client(decode.record, prefill.record)
        await self.know(decode, prefill)
        return decode, prefill, client

    async def client(self, *records: WorkerRecord, gateway: str = "gateway-0") -> FeedClient:
        """Return a gateway that is connected to these workers."""
        client = FeedClient(self.broker, SECRET, gateway)
        self.clients.append(client)
        for record in records:
            await client.follow(record)
        return client

    async def know(self, decode: Node[DecodeWorker], *others: Node[PrefillWorker]) -> None:
        """Wait until a decode worker sees exactly these prefill workers."""
        wanted = {other.record.epoch for other in others}
        await until(
            lambda: {record.epoch for record in decode.edge.peers.ready(Role.PREFILL)} == wanted,
            "the decode worker knows its prefill workers",
        )

    async def num_tasks(self) -> int:
        """Return how many prefill tasks are left."""
        return await self.broker.tasks(FINGERPRINT).num_tasks()

    async def until_idle(self) -> None:
        """Wait until every page of every living worker is free and no task is left (I2)."""
        alive = [node for node in self.nodes if not node.task.done()]
        await until(lambda: all(node.is_idle for node in alive), f"idle: {[node.edge.load for node in alive]}")
        assert await self.num_tasks() == 0

    async def close(self) -> None:
        """End everything."""
        for client in self.clients:
            await client.close()
        await asyncio.gather(*(node.stop() for node in self.nodes if not node.task.done()))

    async def _is_open(self, node: Node[Any]) -> bool:
        states = await self.broker.registry.workers()
        return any(state.record == node.record and state.load.health is WorkerHealth.READY for state in states)

    async def _start(self, kind: Callable[..., WorkerT], name: str, options: dict[str, Any]) -> Node[WorkerT]:
        num_blocks = options.pop("num_blocks", 64)
        epoch = options.pop("epoch", None) or Epoch(secrets.randbits(62))
        valve, signals = Valve(), StopSignals()
        card = options.pop("card", None) or make_card()
        worker = kind(_settings(name, options), _foundation(num_blocks, epoch, valve, card))
        node = Node(worker, asyncio.create_task(worker.run(signals), name=name), signals, valve)
        self.nodes.append(node)
        await until(lambda: node.edge.health is WorkerHealth.READY or node.task.done(), f"{name} is ready")
        assert not node.task.done(), await node.task
        assert node.edge._heart is not None
        node.record = node.edge._heart._record
        await until(partial(self._is_open, node), f"the registry knows that {name} is ready")
        return node


@contextlib.asynccontextmanager
async def running_fabric(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """Put the twins in place of Redis, model, and transports; quicken what is only a matter of waiting."""
    fabric = Fabric(MemoryBroker(MODEL))
    monkeypatch.setattr(edge_module, "RedisBroker", SimpleNamespace(connect=lambda *_: fabric.broker))
    monkeypatch.setattr(edge_module, "load_model", lambda foundation, *_: foundation.checkpoint.valve)
    monkeypatch.setattr(edge_module, "ModelRunner", TaggedRunner)
    monkeypatch.setattr(edge_module, "allocate_pages", lambda layout, num_blocks, buffer, *_: buffer)
    monkeypatch.setattr(edge_module, "PoolSource", lambda memory, *_, **__: fabric.transfer.source(memory))
    monkeypatch.setattr(edge_module, "FeedHub", partial(FeedHub, grace_s=GRACE_S))
    monkeypatch.setattr(decode_worker.worker, "Puller", lambda memory, *_: SlowPuller(fabric.transfer.puller(memory)))
    monkeypatch.setattr(peers, "REFRESH_S", 0.01)
    monkeypatch.setattr(heart, "MIN_INTERVAL_S", 0.005)
    monkeypatch.setattr(decode_worker.receiver, "PEER_CHECK_S", 0.01)
    monkeypatch.setattr(prefill_worker.worker, "REAP_S", 0.01)
    try:
        yield fabric
    finally:
        await fabric.close()


def puller(node: Node[DecodeWorker]) -> SlowPuller:
    """Return the puller of a decode worker."""
    return cast(SlowPuller, node.worker._puller)


def _settings(name: str, options: dict[str, Any]) -> WorkerSettings:
    settings: dict[str, Any] = {
        "secret": SECRET,
        "worker_id": name,
        "transfer": "tcp",
        "block_size": BLOCK_SIZE,
        "chunk_size": CHUNK_SIZE,
        "token_budget": 2 * CHUNK_SIZE,
        "max_sequences": 8,
        "disaggregation": "always",
    }
    return WorkerSettings(**settings | options)


def _foundation(num_blocks: int, epoch: Epoch, valve: Valve, card: ModelCard) -> Foundation:
    checkpoint = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY), valve=valve)
    return Foundation(
        epoch,
        MODEL,
        cast(Checkpoint, checkpoint),
        torch.device("cpu"),
        torch.float32,
        LAYOUT,
        num_blocks,
        MAX_CONTEXT,
        FINGERPRINT,
        card,
        PoolMemory.create(LAYOUT, num_blocks, epoch),
    )


def _cancelled(task: asyncio.Task[None]) -> asyncio.Task[None]:
    task.cancel()
    return task
