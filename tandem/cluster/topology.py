"""From settings to command lines: which processes a cluster of one host has, and what each of them is told."""

import os
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from common.settings.engine import EngineSettings
from common.settings.serving import ServingSettings
from common.settings.setting import environment_of
from tandem.cluster.child import ChildRole, ChildSpec
from tandem.cluster.core_shares import CoreShare, share_cores
from tandem.cluster.redis_server import LOOPBACK
from tandem.cluster.settings import UpSettings

PROJECT_ROOT = Path(__file__).parents[2]

REDIS_GRACE_S = 5.0
DRAIN_MARGIN_S = 10.0
"""What a process gets on top of its drain time before it is killed. A worker leaves within a second of its drain; after
that the interpreter takes apart torch and a large heap, which took 6 s on two cores with a load of 14."""


@dataclass(frozen=True, slots=True)
class Site:
    """What `up` has decided for this host: where things are, and which cores there are."""

    redis_url: str
    seat_prefix: str
    secret_file: Path
    run_dir: Path
    port: int
    rpc_port: int
    listen_fds: tuple[int, ...]
    cores: tuple[int, ...]
    num_usable_cores: int


def seat_prefix_for(redis_url: str | None, state_dir: Path) -> str:
    """Return what distinguishes our seats in a Redis that others may share; nothing is needed in one of our own."""
    if redis_url is None:
        return ""
    return f"{socket.gethostname()}-{sha256(os.fsencode(state_dir)).hexdigest()[:6]}-"


def redis_spec(binary: Path, config: Path) -> ChildSpec:
    """Return the process of the cluster's own Redis."""
    return ChildSpec("redis", ChildRole.REDIS, (str(binary), str(config)), child_environment(), REDIS_GRACE_S)


def cluster_specs(settings: UpSettings, site: Site) -> list[ChildSpec]:
    """Return workers and gateways. Prefill workers come first: they get the first cores."""
    seats = [(ChildRole.PREFILL, number) for number in range(settings.prefill)]
    seats += [(ChildRole.DECODE, number) for number in range(settings.decode)]
    shares = share_cores(site.cores, site.num_usable_cores, len(seats), settings.threads)
    workers = [
        _worker_spec(settings, site, role, number, share) for (role, number), share in zip(seats, shares, strict=True)
    ]
    return workers + [_gateway_spec(settings, site, number) for number in range(settings.gateways)]


def _worker_spec(settings: UpSettings, site: Site, role: ChildRole, number: int, share: CoreShare) -> ChildSpec:
    name = f"{site.seat_prefix}{role}-{number}"
    cores = () if settings.device == "cuda" else share.cores
    borrowed = share.borrowed if cores and settings.lend_cores else ()
    environment = {
        **child_environment(),
        **environment_of(settings, EngineSettings),
        **_shared(site),
        "TANDEM_WORKER_ID": name,
        "TANDEM_HOST": LOOPBACK,
        "TANDEM_PORT": "0",
        "TANDEM_METRICS_PORT": "0",
        "TANDEM_SOCKET_DIR": str(site.run_dir),
        "TANDEM_CPUS": ",".join(map(str, cores)),
        "TANDEM_BORROWED_CPUS": ",".join(map(str, borrowed)),
        "TANDEM_CORE_BOARD": str(site.run_dir / "cores") if borrowed else "",
        "TANDEM_THREADS": str(share.num_threads),
        "OMP_NUM_THREADS": str(share.num_threads),
        # A thread that spins while it waits takes the core from the worker next to it.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return ChildSpec(name, role, _python(f"{role}_worker"), environment, settings.drain_s + DRAIN_MARGIN_S)


def _gateway_spec(settings: UpSettings, site: Site, number: int) -> ChildSpec:
    environment = {
        **child_environment(),
        **environment_of(settings, ServingSettings),
        **_shared(site),
        "TANDEM_HOST": settings.host,
        "TANDEM_PORT": str(site.port),
        "TANDEM_LISTEN_FDS": ",".join(map(str, site.listen_fds)),
        # The port of the gRPC service has no socket of ours: gateways share it, also a leaving one and the next.
        "TANDEM_RPC_PORT": str(site.rpc_port),
        "TANDEM_REUSE_PORT": "true",
        "TANDEM_SOCKET_DIR": str(site.run_dir),
        "TANDEM_DRAIN_DELAY_S": "",  # clients go on connecting to the socket that is ours
    }
    grace_s = settings.drain_s + DRAIN_MARGIN_S
    return ChildSpec(f"gateway-{number}", ChildRole.GATEWAY, _python("gateway"), environment, grace_s, site.listen_fds)


def _python(module: str) -> tuple[str, ...]:
    # -P: a folder named `common` or `gateway` where the user happens to stand must not be taken for ours.
    return (sys.executable, "-P", "-m", module)


def _shared(site: Site) -> dict[str, str]:
    return {
        "TANDEM_REDIS_URL": site.redis_url,
        "TANDEM_SECRET": "",
        "TANDEM_SECRET_FILE": str(site.secret_file),
        "TANDEM_ADVERTISE_HOST": "",
        "PYTHONUNBUFFERED": "1",
    }


def child_environment() -> Mapping[str, str]:
    """Return this process's environment, with our packages also without an installation."""
    environment = dict(os.environ)
    if Path(sysconfig.get_path("purelib")) != PROJECT_ROOT:
        roots = [str(PROJECT_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(roots)
    return environment
