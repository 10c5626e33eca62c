"""`GET /openapi.json`: the description of this API."""

from aiohttp import web

from gateway.api.errors import encoded_response
from gateway.api.keys import SERVICE
from gateway.openapi.document import document


async def describe(http: web.Request) -> web.Response:
    """Describe every route; the first time it is made in a thread."""
    body = await http.app[SERVICE].models.run(document)
    return encoded_response(body)
