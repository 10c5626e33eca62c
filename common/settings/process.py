"""What every process of a cluster is told: where Redis is, the shared secret, and how to talk about itself."""

from dataclasses import dataclass

from common.errors import InvalidSetting
from common.settings.readers import auto, boolean, number, text
from common.settings.setting import setting

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("json", "text")
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings that gateways and workers share."""

    redis_url: str | None = setting("redis://127.0.0.1:6379/0", "Redis of the cluster", text, is_shown=False)
    secret: str = setting("", "shared secret of the cluster's internal calls", text, is_secret=True)
    otlp_endpoint: str | None = setting(
        None, "collector that receives traces, e.g. http://localhost:4317; auto: none", auto(text)
    )
    log_level: str = setting("info", "least severe log lines to write", text, choices=LOG_LEVELS)
    log_format: str = setting("json", "form of a log line", text, choices=LOG_FORMATS)
    vllm_metrics: bool = setting(False, "also export metrics under the names of vLLM", boolean)
    drain_s: float = setting(30.0, "longest wait for running requests when stopping", number(0, 86400), unit="seconds")

    def __post_init__(self) -> None:
        if self.redis_url is not None and not self.redis_url.startswith(REDIS_SCHEMES):
            raise InvalidSetting("redis_url", "(not shown)", "must start with " + " or ".join(REDIS_SCHEMES))


def require_secret(secret: str) -> None:
    """Refuse to start without the secret that authenticates internal calls."""
    if not secret:
        raise InvalidSetting(
            "TANDEM_SECRET", secret, "must be set (or --secret-file): internal calls are authenticated"
        )
