"""The Lua scripts, read from the package once. They need Redis 6.2 (or Valkey), take their time from Redis, and name
every key they touch in KEYS."""

from dataclasses import dataclass
from hashlib import sha1
from importlib import resources

from common.broker.policy import BrokerPolicy


@dataclass(frozen=True, slots=True)
class Script:
    """A script as Redis knows it: by the digest of its source."""

    source: str
    digest: str


def milliseconds(seconds: float) -> int:
    """Return a duration as scripts and commands take it."""
    return round(seconds * 1000)


def queue_limits(policy: BrokerPolicy) -> tuple[int, int, int, int]:
    """Return the arguments that the prelude expects before those of the script behind it."""
    return (
        milliseconds(policy.stream_ttl_s),
        milliseconds(policy.record_ttl_s),
        milliseconds(policy.gateway_ttl_s),
        milliseconds(policy.ageing_s),
    )


def _load(*names: str) -> Script:
    folder = resources.files("common.broker")
    source = "\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


PRELUDE = ("queue", "order", "lanes")

BEAT = _load(*PRELUDE, "beat")
BEAT_GATEWAY = _load(*PRELUDE, "beat_gateway")
PLACE = _load(*PRELUDE, "place")
WITHDRAW = _load(*PRELUDE, "withdraw")
TELL_PREFIXES = _load("tell_prefixes")
DEPTHS = _load("depths")
WHEREABOUTS = _load("whereabouts")
WORKERS = _load("workers")
LEAVE = _load("leave")
ANNOUNCE = _load("announce")
MODELS = _load("models")
PUBLISH_TASK = _load("publish_task")
RETIRE_TASK = _load("retire_task")
OPEN_GROUP = _load("open_group")
CLAIMER = _load("claimer")
ABANDONED_TASKS = _load("abandoned_tasks")
RETIRE_CONSUMERS = _load("retire_consumers")
POST_NOTICE = _load("post_notice")
RESERVE_PERMIT = _load("limits", "reserve_permit")
SETTLE_PERMIT = _load("limits", "settle_permit")
RELEASE_PERMIT = _load("limits", "release_permit")
RENEW_PERMITS = _load("limits", "renew_permits")
READ_KEYS = _load("read_keys")
WRITE_KEY = _load("write_key")
