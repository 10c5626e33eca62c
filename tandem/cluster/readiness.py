"""When processes are up: each worker says so in the registry, each gateway that it could serve."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import assert_never

import aiohttp

from common.broker.overview import Observer
from common.errors import BrokerUnavailable
from common.messages.registry import WorkerHealth, WorkerState
from common.settings.gateway import own_socket_in
from tandem.cluster.child import Child, ChildRole
from tandem.cluster.events import Event, Loading, Narrator
from tandem.cluster.gateway_probe import is_ready
from tandem.cluster.redis_server import wait_for_redis

POLL_INTERVAL_S = 0.1


Pids = Mapping[str, int | None]
"""The process in each seat, None between two lives."""


async def wait_for_workers(observer: Observer, pids_of: Callable[[], Pids], narrate: Narrator) -> None:
    """Return when the worker in every seat is ready; tell how far each one is. A Redis that is away is waited for."""
    while True:
        pids = pids_of()
        loading = loading_of(await _workers(observer), pids)
        narrate(loading)
        if loading.num_ready == len(pids):
            return
        await asyncio.sleep(POLL_INTERVAL_S)


class Readiness:
    """Knows when the process of one child is ready. `run_dir` is where gateways have sockets of their own."""

    def __init__(self, observer: Observer, run_dir: Path) -> None:
        self._observer = observer
        self._run_dir = run_dir

    async def until_ready(self, child: Child) -> None:
        """Return when the child's process could serve; it may be another one by then than at the beginning."""
        match child.spec.role:
            case ChildRole.PREFILL | ChildRole.DECODE:
                await wait_for_workers(self._observer, lambda: {child.spec.name: child.pid}, _tell_nobody)
            case ChildRole.GATEWAY:
                await self._until_gateway_ready(child)
            case ChildRole.REDIS:
                await wait_for_redis(self._observer)
            case _:
                assert_never(child.spec.role)

    async def _until_gateway_ready(self, child: Child) -> None:
        while child.pid is None or not await self._is_gateway_ready(child.pid):  # noqa: ASYNC110 - as everywhere here
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _is_gateway_ready(self, pid: int) -> bool:
        """Ask exactly this process: the port may belong to several."""
        connector = aiohttp.UnixConnector(str(own_socket_in(self._run_dir, pid)))
        async with aiohttp.ClientSession(connector=connector) as session:
            return await is_ready(session, "http://gateway")


def _tell_nobody(_: Event) -> None:
    """Nobody watches."""


async def _workers(observer: Observer) -> tuple[WorkerState, ...]:
    try:
        return (await observer.overview()).workers
    except BrokerUnavailable:
        return ()


def loading_of(workers: Collection[WorkerState], pids: Pids) -> Loading:
    """Return how far the workers in these seats are; what an earlier process left in the registry does not count."""
    loads = {str(state.record.worker): state.load for state in workers if state.record.pid in pids.values()}
    fractions = dict.fromkeys(pids, 0.0)
    num_ready = 0
    for name in pids:
        load = loads.get(name)
        if load is not None:
            is_ready = load.health is WorkerHealth.READY
            fractions[name] = 1.0 if is_ready else load.loading_fraction
            num_ready += is_ready
    return Loading(fractions, num_ready)
