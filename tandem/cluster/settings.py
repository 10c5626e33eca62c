"""What `tandem up` is told: the shape of the cluster on this host, and the engine settings its workers share."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidSetting
from common.settings.engine import EngineSettings
from common.settings.gateway import DEFAULT_PORT
from common.settings.readers import auto, boolean, integer, number, path, port_number, text
from common.settings.serving import ServingSettings
from common.settings.setting import setting
from tandem.cluster.state import DEFAULT_STATE_DIR

MAX_PROCESSES = 256


@dataclass(frozen=True, kw_only=True)
class UpSettings(EngineSettings, ServingSettings):
    """Start a cluster on this host: Redis, prefill workers, decode workers and gateways.

    Supervises them until Ctrl-C, which lets running requests finish; a second Ctrl-C does not.
    """

    prefill: int = setting(1, "prefill workers", integer(0, MAX_PROCESSES))
    decode: int = setting(1, "decode workers", integer(1, MAX_PROCESSES))
    gateways: int = setting(1, "gateways, which share the port", integer(1, MAX_PROCESSES))
    lend_cores: bool = setting(
        True, "workers compute on each other's cores while these are idle (CPUs, native kernels)", boolean
    )
    host: str = setting("127.0.0.1", "address for clients; 0.0.0.0: any", text)
    port: int = setting(DEFAULT_PORT, "port for clients; 0: any free one", port_number)
    state_dir: Path = setting(DEFAULT_STATE_DIR, "folder of logs, secret and state of this cluster", path)
    detach: bool = setting(False, "return when the cluster is ready and leave it running", boolean)
    redis_url: str | None = setting(None, "an existing Redis; auto: start one", auto(text), is_shown=False)
    ready_timeout_s: float = setting(900.0, "longest wait until it is ready", number(1, 86400), unit="seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host:
            raise InvalidSetting("host", self.host, "must be an address")
        if self.disaggregation == "always" and not self.prefill:
            raise InvalidSetting("disaggregation", "always", "needs a prefill worker, but prefill is 0")
