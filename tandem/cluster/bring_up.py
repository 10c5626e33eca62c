"""From checked settings to a running cluster: prepares the state directory, and hands the phases to `Cluster`."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.broker.overview import Observer
from common.errors import StartupError
from common.lifecycle.cgroup import cpu_quota
from common.lifecycle.cores import available_cores, num_usable_cores
from tandem.cluster import preflight, sweep, topology
from tandem.cluster.child import ChildSpec
from tandem.cluster.cluster import Cluster, Limits, Phase
from tandem.cluster.events import Narrator, Ready, logged
from tandem.cluster.identity import ref_of
from tandem.cluster.ports import free_port, is_loopback
from tandem.cluster.preflight import ModelFiles
from tandem.cluster.readiness import wait_for_gateway, wait_for_workers
from tandem.cluster.redis_binary import RedisBinary, require_redis
from tandem.cluster.redis_server import new_embedded_redis, require_answer, wait_for_redis, write_config
from tandem.cluster.settings import UpSettings
from tandem.cluster.state import ClusterState, StateDir, url_of


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks before the start have found. `redis` None: an existing one is used."""

    model: ModelFiles
    redis: RedisBinary | None


def check(settings: UpSettings) -> Checked:
    """Raise the `StartupError` that a start would end in, as far as this can be told beforehand."""
    model = preflight.require_model(settings)
    preflight.require_gateway_port(settings)
    preflight.require_memory(settings, model)
    return Checked(model, require_redis() if settings.redis_url is None else None)


async def run_cluster(settings: UpSettings, narrate: Narrator) -> None:
    """Start a cluster and supervise it until it is told to stop; raise `StartupError` if it cannot run."""
    state_dir = StateDir(settings.state_dir)
    state_dir.create()
    with state_dir.locked():
        sweep.remove_leftovers(state_dir)
        checked = check(settings)
        state_dir.obtain_secret(settings.secret)
        with _run_dir(state_dir) as run_dir:
            await _run(settings, checked, state_dir, run_dir, logged(narrate, state_dir.log_file("supervisor")))


async def _run(settings: UpSettings, checked: Checked, state_dir: StateDir, run_dir: Path, narrate: Narrator) -> None:
    port = settings.port or free_port(settings.host)
    redis_url, redis_specs = _redis(settings, checked, run_dir)
    site = _site(settings, redis_url, state_dir, run_dir, port)
    limits = Limits(settings.ready_timeout_s, settings.drain_s)
    cluster = Cluster(state_dir, _first_state(settings, checked, site), limits, narrate)
    observer = Observer(redis_url)

    async def redis_ready() -> None:
        await (wait_for_redis(observer) if redis_specs else require_answer(observer, redis_url))

    async def everybody_ready() -> None:
        await wait_for_workers(observer, cluster.worker_pids, narrate)
        await wait_for_gateway(url_of(settings.host, port))

    ready = Ready(url_of(settings.host, port), checked.model.name, str(state_dir.path), not is_loopback(settings.host))
    phases = (Phase(redis_specs, redis_ready), Phase(topology.cluster_specs(settings, site), everybody_ready))
    try:
        await cluster.run(phases, partial(narrate, ready))
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


def _site(settings: UpSettings, redis_url: str, state_dir: StateDir, run_dir: Path, port: int) -> topology.Site:
    cores = available_cores()
    return topology.Site(
        redis_url=redis_url,
        seat_prefix=topology.seat_prefix_for(settings.redis_url, state_dir.path),
        secret_file=state_dir.secret_file,
        run_dir=run_dir,
        port=port,
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
        run_dir=str(site.run_dir),
    )


@contextlib.contextmanager
def _run_dir(state_dir: StateDir) -> Iterator[Path]:
    run_dir = state_dir.create_run_dir()
    try:
        yield run_dir
    finally:
        state_dir.remove_run_dir(run_dir)
        state_dir.forget()
