"""All planted bugs."""

from tests.planted import broker, cache, duress, gateway, handover, identities, scheduling, transfer

PLANTS = (
    *handover.PLANTS,
    *identities.PLANTS,
    *cache.PLANTS,
    *transfer.PLANTS,
    *scheduling.PLANTS,
    *gateway.PLANTS,
    *duress.PLANTS,
    *broker.PLANTS,
)
