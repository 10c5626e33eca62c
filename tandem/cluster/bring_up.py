"""From checked settings to a running cluster: prepares the state directory, and hands the phases to `Cluster`."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.broker.overview import Observer
from common.errors import StartupError
from common.lifecycle.cgroup import cpu_quota
from common.lifecycle.cores import available_cores, num_usable_cores
from tandem.cluster import preflight, sweep, topology
from tandem.cluster.child import ChildSpec
from tandem.cluster.cluster import Cluster, Limits, Phase
from tandem.cluster.control import ControlDesk, control_socket_in
from tandem.cluster.events import Narrator, Ready, logged
from tandem.cluster.identity import ref_of
from tandem.cluster.listeners import Listeners, listening
from tandem.cluster.ports import free_port, is_loopback
from tandem.cluster.preflight import ModelFiles
from tandem.cluster.readiness import Readiness, wait_for_workers
from tandem.cluster.redis_binary import RedisBinary, require_redis
from tandem.cluster.redis_server import new_embedded_redis, require_answer, wait_for_redis, write_config
from tandem.cluster.rolling import RollingRestart
from tandem.cluster.settings import UpSettings
from tandem.cluster.state import ClusterState, StateDir, url_of


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks before the start have found. `redis` None: an existing one is used."""

    model: ModelFiles
    redis: RedisBinary | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster lives: its files, its sockets, and where clients reach it."""

    state_dir: StateDir
    run_dir: Path
    listeners: Listeners


def check(settings: UpSettings) -> Checked:
    """Raise the `StartupError` that a start would end in, as far as this can be told beforehand."""
    settings.refuse_exposure(settings.host)
    preflight.require_certificates(settings)
    model = preflight.require_model(settings)
    preflight.require_rpc_port(settings)
    preflight.require_memory(settings, model)
    return Checked(model, require_redis() if settings.redis_url is None else None)


async def run_cluster(settings: UpSettings, narrate: Narrator) -> None:
    """Start a cluster and supervise it until it is told to stop; raise `StartupError` if it cannot run."""
    state_dir = StateDir(settings.state_dir)
    state_dir.create()
    with state_dir.locked():
        sweep.remove_leftovers(state_dir)
        with listening(settings.host, settings.port) as listeners:
            checked = check(settings)
            state_dir.obtain_secret(settings.secret)
            with _run_dir(state_dir) as run_dir:
                place = Place(state_dir, run_dir, listeners)
                await _run(settings, checked, place, logged(narrate, state_dir.log_file("supervisor")))


async def _run(settings: UpSettings, checked: Checked, place: Place, narrate: Narrator) -> None:
    state_dir = place.state_dir
    redis_url, redis_specs = _redis(settings, checked, place.run_dir)
    site = _site(settings, redis_url, place)
    limits = Limits(settings.ready_timeout_s, settings.drain_s)
    cluster = Cluster(state_dir, _first_state(settings, checked, site), limits, narrate)
    observer = Observer(redis_url)
    readiness = Readiness(observer, place.run_dir)

    async def redis_ready() -> None:
        await (wait_for_redis(observer) if redis_specs else require_answer(observer, redis_url))

    async def everybody_ready() -> None:
        await wait_for_workers(observer, cluster.worker_pids, narrate)
        await asyncio.gather(*(readiness.until_ready(gateway) for gateway in cluster.gateways()))

    @contextlib.asynccontextmanager
    async def business() -> AsyncIterator[None]:
        restart = RollingRestart(cluster.supervisor, readiness.until_ready)
        async with ControlDesk(control_socket_in(place.run_dir), restart, narrate):
            url = url_of(settings.host, site.port, is_tls=settings.tls_cert is not None)
            narrate(Ready(url, checked.model.name, str(state_dir.path), not is_loopback(settings.host)))
            try:
                yield
            finally:
                # Nobody takes what would come now: with the gateways' own ends closed, clients are refused at once.
                place.listeners.close()

    phases = (Phase(redis_specs, redis_ready), Phase(topology.cluster_specs(settings, site), everybody_ready))
    try:
        await cluster.run(phases, business())
    finally:
        await observer.close()


def _redis(settings: UpSettings, checked: Checked, run_dir: Path) -> tuple[str, list[ChildSpec]]:
    """Return the URL of Redis and the process to start for it, none if it exists."""
    if settings.redis_url is not None:
        return settings.redis_url, []
    assert checked.redis is not None
    redis = new_embedded_redis()
    config = run_dir / "redis.conf"
    write_config(redis, config)
    return redis.url, [topology.redis_spec(checked.redis.path, config)]


def _site(settings: UpSettings, redis_url: str, place: Place) -> topology.Site:
    cores = available_cores()
    return topology.Site(
        redis_url=redis_url,
        seat_prefix=topology.seat_prefix_for(settings.redis_url, place.state_dir.path),
        secret_file=place.state_dir.secret_file,
        run_dir=place.run_dir,
        port=place.listeners.port,
        rpc_port=settings.rpc_port or free_port(settings.host),
        listen_fds=place.listeners.descriptors,
        cores=cores,
        num_usable_cores=num_usable_cores(len(cores), cpu_quota()),
    )


def _first_state(settings: UpSettings, checked: Checked, site: topology.Site) -> ClusterState:
    supervisor = ref_of(os.getpid())
    if supervisor is None:
        raise StartupError("this system does not tell when a process was started, so none could be stopped safely")
    return ClusterState(
        supervisor=supervisor,
        model=checked.model.name,
        redis_url=site.redis_url,
        host=settings.host,
        port=site.port,
        rpc_port=site.rpc_port,
        run_dir=str(site.run_dir),
        is_tls=settings.tls_cert is not None,
    )


@contextlib.contextmanager
def _run_dir(state_dir: StateDir) -> Iterator[Path]:
    run_dir = state_dir.create_run_dir()
    try:
        yield run_dir
    finally:
        state_dir.remove_run_dir(run_dir)
        state_dir.forget()
