"""What the caller has left of its minute, told in the head of whatever asked its limits."""

from aiohttp import web

from gateway.api.keys import QUOTA
from gateway.quota_fields import quota_fields


async def tell_quota(request: web.Request, response: web.StreamResponse) -> None:
    """Tell in the head of an answer what its tenant has left."""
    quota = request.get(QUOTA)
    if quota is not None:
        response.headers.update(quota_fields(quota))
