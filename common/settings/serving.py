"""What gateways are told about requests: who may send them, how often they may fail, how long they may take, how
readiness is proven.

`tandem up` takes the same and hands it on.
"""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidSetting
from common.settings.exposure import reaches_others
from common.settings.process import ProcessSettings
from common.settings.readers import AUTO, auto, boolean, integer, number, path, port_number, text
from common.settings.setting import setting

DEFAULT_RPC_PORT = 8001
IN_REDIS = "redis"


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
    max_waiting_requests: int = setting(
        1024, "requests of one model that wait for room before new ones get 503", integer(0)
    )
    max_waiting_tokens: int = setting(4_000_000, "tokens of these, prompts and expected answers", integer(1))
    max_queue_s: float = setting(
        0.0,
        "a request that would wait longer for a worker gets 503 at once; 0: as long as its deadline allows",
        number(0, 86400),
        unit="seconds",
    )
    api_keys_file: Path | None = setting(
        None, "file of the API keys that clients must show (`tandem keys`); auto: none", auto(path)
    )
    api_keys: str | None = setting(
        None, "redis: clients must show API keys that Redis holds; auto: no", auto(text), choices=(AUTO, IN_REDIS)
    )
    tls_cert: Path | None = setting(
        None, "PEM file of the certificate, with its chain, for HTTP and gRPC; auto: no TLS", auto(path)
    )
    tls_key: Path | None = setting(None, "PEM file of its key", auto(path))
    tls_client_ca: Path | None = setting(
        None, "PEM file of authorities; clients need a certificate of one of them; auto: none", auto(path)
    )
    allow_anonymous: bool = setting(False, "serve without API keys also at addresses that other hosts reach", boolean)
    open_metrics: bool = setting(True, "whether /metrics needs no API key", boolean)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_keys_file is not None and self.api_keys is not None:
            raise InvalidSetting("api_keys", self.api_keys, f"keys are in the file {self.api_keys_file} already")

        if (self.tls_cert is None) != (self.tls_key is None):
            name = "tls_key" if self.tls_key is None else "tls_cert"
            raise InvalidSetting(name, None, "certificate and key are needed together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidSetting("tls_client_ca", str(self.tls_client_ca), "has no meaning without a certificate")

    @property
    def has_api_keys(self) -> bool:
        """Whether clients must show a key."""
        return self.api_keys_file is not None or self.api_keys is not None

    def refuse_exposure(self, host: str) -> None:
        """Raise `InvalidSetting` if other hosts would reach a listener on `host`, and nobody would need a key or a
        certificate there."""
        are_clients_known = self.has_api_keys or self.tls_client_ca is not None
        if not are_clients_known and not self.allow_anonymous and reaches_others(host):
            raise InvalidSetting(
                "host",
                host,
                "other hosts reach it, and nobody would need an API key: give --api-keys-file or --api-keys redis (or "
                "--tls-client-ca), or say --allow-anonymous",
            )
