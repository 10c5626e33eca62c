"""What the subcommands of `tandem keys` are told."""

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.errors import InvalidSetting, StartupError
from common.messages.ids import ModelName
from common.settings.readers import AUTO, auto, boolean, integer, number, path, text
from common.settings.serving import IN_REDIS
from common.settings.setting import setting
from tandem.cluster.state import DEFAULT_STATE_DIR

MAX_COUNT = 1_000_000_000_000
MAX_NAME_CHARS = 64

ALL_MODELS: tuple[ModelName, ...] = ()
_UNITS_S = {"h": 3600, "d": 86400}


def _models(raw: str) -> tuple[ModelName, ...]:
    names = [name.strip() for name in raw.split(",")]
    if not all(names):
        raise ValueError("must be names of models like a,b")
    return tuple(ModelName(name) for name in names)


def _expiry(raw: str) -> int:
    """Return the unix seconds of "30d", "12h" (from now) or "2030-12-31" (as this day begins, UTC)."""
    match = re.fullmatch(r"(\d{1,5})([hd])", raw.strip())
    if match is not None:
        return int(time.time()) + int(match[1]) * _UNITS_S[match[2]]
    try:
        expiry = int(datetime.strptime(raw.strip(), "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise ValueError("must be like 30d, 12h or 2030-12-31") from None
    if expiry <= time.time():
        raise ValueError("is in the past")
    return expiry


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Where the keys are."""

    api_keys_file: Path | None = setting(None, "file that holds the keys; auto: none", auto(path))
    api_keys: str | None = setting(None, "redis: Redis holds the keys", auto(text), choices=(AUTO, IN_REDIS))
    redis_url: str | None = setting(
        None, "that Redis; auto: the one of the cluster that runs here", auto(text), is_shown=False
    )
    state_dir: Path = setting(DEFAULT_STATE_DIR, "folder that was given to `tandem up`", path)

    def __post_init__(self) -> None:
        if (self.api_keys_file is None) == (self.api_keys is None):
            raise StartupError("say where the keys are: either --api-keys-file FILE or --api-keys redis")


@dataclass(frozen=True, kw_only=True)
class AddSettings(KeySettings):
    """Make a key and print it. Only its SHA-256 is kept: it cannot be shown again."""

    name: str = setting("", "whose it is, for people", text, env="TANDEM_KEY_NAME")
    requests_per_minute: int | None = setting(
        None,
        "requests per minute, over all gateways; auto: any",
        auto(integer(1, MAX_COUNT)),
        env="TANDEM_KEY_REQUESTS",
    )
    tokens_per_minute: int | None = setting(
        None,
        "tokens of prompts and answers per minute; auto: any",
        auto(integer(1, MAX_COUNT)),
        env="TANDEM_KEY_TOKENS",
    )
    max_concurrent: int | None = setting(
        None, "requests at once; auto: any", auto(integer(1, MAX_COUNT)), env="TANDEM_KEY_CONCURRENT"
    )
    max_priority: int = setting(
        0, "highest priority that its requests may ask for", integer(-1000, 1000), env="TANDEM_KEY_PRIORITY"
    )
    models: tuple[ModelName, ...] = setting(
        ALL_MODELS, "models that it is good for, e.g. a,b; none: all", _models, env="TANDEM_KEY_MODELS"
    )
    weight: float = setting(
        1.0, "its share while there is not enough for all", number(0.001, 1000), env="TANDEM_KEY_WEIGHT"
    )
    expires: int | None = setting(
        None, "when it ends: 30d, 12h or 2030-12-31; auto: never", auto(_expiry), env="TANDEM_KEY_EXPIRES"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name or len(self.name) > MAX_NAME_CHARS or not self.name.isprintable():
            raise InvalidSetting("name", self.name, f"must be 1 to {MAX_NAME_CHARS} printable characters")


@dataclass(frozen=True, kw_only=True)
class ListSettings(KeySettings):
    """Show all keys: their ids, names and limits, never the keys themselves.

    --json prints {"keys": [{"id", "name", "created", "limits": {"requests_per_minute", "tokens_per_minute",
    "max_concurrent"}, "max_priority", "models", "weight", "expires"}]}.
    """

    json: bool = setting(False, "print JSON", boolean)


@dataclass(frozen=True, kw_only=True)
class RotateSettings(KeySettings):
    """Print a new key that takes the place of an old one, with its id and limits. The old one ends at once."""


@dataclass(frozen=True, kw_only=True)
class RevokeSettings(KeySettings):
    """Forget keys, named by their ids. Gateways let nobody in with them two seconds later; what runs goes on."""
