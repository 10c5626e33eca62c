"""All planted bugs."""

from tests.planted import broker, cache, duress, gateway, handover, identities, sampling, scheduling, transfer

PLANTS = (
    *handover.PLANTS,
    *identities.PLANTS,
    *cache.PLANTS,
    *transfer.PLANTS,
    *scheduling.PLANTS,
    *sampling.PLANTS,
    *gateway.PLANTS,
    *duress.PLANTS,
    *broker.PLANTS,
)
