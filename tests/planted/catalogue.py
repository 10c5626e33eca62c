"""All planted bugs."""

from tests.planted import (
    answers,
    broker,
    cache,
    choices,
    decode_choices,
    duress,
    gateway,
    grammars,
    handover,
    http,
    identities,
    rpc,
    sampling,
    scheduling,
    tenants,
    transfer,
)

PLANTS = (
    *handover.PLANTS,
    *identities.PLANTS,
    *cache.PLANTS,
    *transfer.PLANTS,
    *scheduling.PLANTS,
    *sampling.PLANTS,
    *gateway.PLANTS,
    *rpc.PLANTS,
    *answers.PLANTS,
    *http.PLANTS,
    *choices.PLANTS,
    *decode_choices.PLANTS,
    *grammars.PLANTS,
    *duress.PLANTS,
    *broker.PLANTS,
    *tenants.PLANTS,
)
