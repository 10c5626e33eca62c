"""What every JSON object of one answer begins with, in all endpoints that generate."""

import time
from dataclasses import dataclass

from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.keys import REQUEST_ID
from gateway.served_models import ServedModel


@dataclass(frozen=True, slots=True)
class Heading:
    """`unused` stands for the usage of chunks that have none: null if the client asked for usage, else absent."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    unused: UnsetType | None


def heading_of(http: web.Request, prefix: str, model: ServedModel, *, includes_usage: bool) -> Heading:
    """Return the heading of the answer to a request; its id begins with `prefix`."""
    return Heading(
        id=f"{prefix}-{http[REQUEST_ID]}",
        created=int(time.time()),
        model=model.card.model,
        system_fingerprint=model.system_fingerprint,
        unused=None if includes_usage else UNSET,
    )
