"""Who may use a cluster, and how much: an API key as the cluster keeps it. The key itself is in no message.

A field that this version does not know makes a key malformed: it may be a restriction.
"""

from typing import Annotated

import msgspec

from common.messages.ids import ModelName, TenantId

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]


class TenantLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one key may use of a cluster, over all its gateways. None: without bound.

    A request for n choices counts as n. Tokens are those of prompt and answer.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing has to be counted."""
        return self == NO_LIMITS


NO_LIMITS = TenantLimits()


class ApiKey(
    msgspec.Struct, frozen=True, tag="api_key", tag_field="kind", omit_defaults=True, forbid_unknown_fields=True
):
    """One key. `digest` is the SHA-256 of the key in hex; `created` and `expires` are unix seconds.

    `models` None: every model. `max_priority` is the highest priority that its requests may ask for. `weight` is the
    share of the service that its requests get while there is not enough for all.
    """

    id: Annotated[TenantId, msgspec.Meta(min_length=1)]
    name: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    created: int
    limits: TenantLimits = NO_LIMITS
    max_priority: int = 0
    models: tuple[ModelName, ...] | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    expires: int | None = None


class KeyListing(msgspec.Struct, frozen=True):
    """All keys as they were at `version`, which changes with every write."""

    version: str
    keys: tuple[ApiKey, ...]
