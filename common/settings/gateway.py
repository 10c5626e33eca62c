"""What one gateway process is told."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidSetting
from common.settings.process import require_secret
from common.settings.readers import (
    NO_DESCRIPTORS,
    auto,
    boolean,
    descriptors,
    integer,
    number,
    path,
    port_number,
    size_bytes,
    text,
)
from common.settings.serving import ServingSettings
from common.settings.setting import setting

DEFAULT_PORT = 8000
MIB = 1 << 20


def own_socket_in(folder: Path, pid: int) -> Path:
    """Return where a gateway process answers that was told of this folder."""
    return folder / f"gateway-{pid}.sock"


@dataclass(frozen=True, kw_only=True)
class GatewayProcessSettings(ServingSettings):
    """The gateway of a Tandem cluster: OpenAI API, health and metrics on one port."""

    host: str = setting("127.0.0.1", "address to listen on for clients", text)
    port: int = setting(DEFAULT_PORT, "port for clients", port_number)
    reuse_port: bool = setting(False, "let several gateways of one host share the port", boolean)
    listen_fds: tuple[int, ...] = setting(
        NO_DESCRIPTORS,
        "inherited sockets to take clients from instead of host and port, e.g. 3; none: not inherited",
        descriptors,
    )
    socket_dir: Path | None = setting(
        None, "folder for gateway-<pid>.sock, where this very process can be asked; auto: no such socket", auto(path)
    )
    drain_delay_s: float = setting(
        0.0,
        "how long connections are accepted when stopping, for load balancers to see that it is not ready",
        number(0, 3600),
        unit="seconds",
    )
    max_body_bytes: int = setting(8 * MIB, "largest request body, e.g. 8MiB", size_bytes)
    max_unread_bytes: int = setting(
        256 * MIB,
        "what may wait for clients that read too slowly, all together; then the slowest are ended",
        size_bytes,
    )
    max_concurrent_requests: int = setting(1024, "requests in progress before new ones get 503", integer(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_secret(self.secret)
        if not self.host:
            raise InvalidSetting("host", self.host, "must be an address")
