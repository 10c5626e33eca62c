"""Who sends a request: the tenant behind its key, and what that key allows."""

from dataclasses import dataclass

from common.errors import PermissionDenied
from common.messages.ids import ANYBODY, ModelName, TenantId
from common.messages.tenant import NO_LIMITS, ApiKey, TenantLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """`max_priority` None: any priority; `models` None: any model."""

    tenant: TenantId
    limits: TenantLimits = NO_LIMITS
    max_priority: int | None = None
    models: frozenset[ModelName] | None = None
    weight: float = 1.0

    def may_see(self, model: ModelName) -> bool:
        """Return whether the key is good for a model."""
        return self.models is None or model in self.models

    def priority(self, wanted: int | None) -> int:
        """Return the priority of a request; who wants none asks for no more than the key allows."""
        if wanted is not None:
            return wanted
        return 0 if self.max_priority is None else min(0, self.max_priority)

    def require(self, model: ModelName, priority: int | None = None) -> None:
        """Raise `PermissionDenied` unless the key is good for a request to that model, which may name a priority."""
        if not self.may_see(model):
            raise PermissionDenied("This API key may not use the model.", param="model", code="model_not_allowed")
        if priority is not None and self.max_priority is not None and priority > self.max_priority:
            raise PermissionDenied(
                f"This API key may not ask for a priority above {self.max_priority}.",
                param="priority",
                code="priority_not_allowed",
            )


ANYONE = Caller(ANYBODY)
"""Who calls a gateway without keys."""


def caller_of(key: ApiKey) -> Caller:
    """Return what a key allows."""
    models = None if key.models is None else frozenset(key.models)
    return Caller(key.id, key.limits, key.max_priority, models, key.weight)
