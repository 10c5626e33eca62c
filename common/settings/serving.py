"""What gateways are told about requests: how often they may fail, how long they may take, how readiness is proven.

`tandem up` takes the same and hands it on.
"""

from dataclasses import dataclass

from common.settings.process import ProcessSettings
from common.settings.readers import integer, number, port_number
from common.settings.setting import setting

DEFAULT_RPC_PORT = 8001


@dataclass(frozen=True, kw_only=True)
class ServingSettings(ProcessSettings):
    """Settings of a gateway that are not about its own address."""

    rpc_port: int = setting(DEFAULT_RPC_PORT, "port of the gRPC service for clients; 0: any", port_number)
    max_failures: int = setting(
        3, "failures (lost placements and prefill tries) with which a request fails", integer(1, 100)
    )
    deadline_s: float = setting(
        600.0,
        "time of a request that names none (x-request-deadline-ms); 0: without end",
        number(0, 86400),
        unit="seconds",
    )
    canary_interval_s: float = setting(
        10.0,
        "how often a token is sent through every worker that has proved nothing since",
        number(0.1, 3600),
        unit="seconds",
    )
