"""`GET /openapi.json`: the description of this API."""

from aiohttp import web

from gateway.api.keys import SERVICE
from gateway.openapi.document import document


async def describe(http: web.Request) -> web.Response:
    """Describe every route; the first time it is made in a thread."""
    body = await http.app[SERVICE].models.run(document)
    return web.Response(body=body, content_type="application/json", charset="utf-8")
