"""What one worker process, prefill or decode, is told."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidSetting
from common.settings.engine import EngineSettings
from common.settings.process import require_secret
from common.settings.readers import NO_CORES, auto, core_list, path, port_number, text
from common.settings.setting import setting


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(EngineSettings):
    """A worker of a Tandem cluster."""

    worker_id: str | None = setting(
        None, "name of this worker's seat, e.g. decode-0; auto: by role and host", auto(text)
    )
    host: str = setting("127.0.0.1", "address to listen on for peers", text)
    advertise_host: str | None = setting(None, "address that peers use to reach this worker; auto: --host", auto(text))
    port: int = setting(0, "port of the internal listener; 0: any", port_number)
    advertise_port: int | None = setting(
        None, "port that peers use to reach the internal listener; auto: the one listened on", auto(port_number)
    )
    metrics_port: int = setting(0, "port of /metrics; 0: any", port_number)
    socket_dir: Path | None = setting(
        None, "folder of the sockets that hand out shared memory; auto: a new folder", auto(path)
    )
    cpus: tuple[int, ...] = setting(NO_CORES, "cores this worker is pinned to, e.g. 0-3; none: not pinned", core_list)
    core_board: Path | None = setting(
        None, "file in which the workers of a host say which of their cores are in use; auto: none", auto(path)
    )
    borrowed_cpus: tuple[int, ...] = setting(
        NO_CORES, "cores of other workers, computed on while the board says that they are idle", core_list
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_secret(self.secret)
        if self.borrowed_cpus and self.core_board is None:
            raise InvalidSetting("borrowed_cpus", ",".join(map(str, self.borrowed_cpus)), "needs a core_board")
        if not self.host:
            raise InvalidSetting("host", self.host, "must be an address")

    @property
    def reachable_host(self) -> str:
        """Address under which peers reach this worker."""
        return self.advertise_host or self.host
