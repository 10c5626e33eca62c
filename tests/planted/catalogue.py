"""All planted bugs."""

from tests.planted import broker, cache, gateway, handover, scheduling, transfer

PLANTS = (
    *handover.PLANTS,
    *cache.PLANTS,
    *transfer.PLANTS,
    *scheduling.PLANTS,
    *gateway.PLANTS,
    *broker.PLANTS,
)
