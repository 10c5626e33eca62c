"""When a cluster is up: each worker says so in the registry, and the gateway could serve. Reports loading meanwhile."""

import asyncio
from collections.abc import Callable, Collection, Mapping

import aiohttp

from common.broker.overview import Observer
from common.errors import BrokerUnavailable
from common.messages.registry import WorkerHealth, WorkerState
from tandem.cluster.events import Loading, Narrator
from tandem.cluster.gateway_probe import wait_until_ready

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


async def wait_for_gateway(url: str) -> None:
    """Return when the gateway at `url` is ready."""
    async with aiohttp.ClientSession() as session:
        await wait_until_ready(session, url)


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
