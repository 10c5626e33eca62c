"""Around every request: its connection is known to be in use, and is given up once the gateway drains."""

from aiohttp import web
from aiohttp.hdrs import CONNECTION

from gateway.api.errors import Handler
from gateway.api.keys import SERVICE


@web.middleware
async def use_connection(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request on a connection that must not be closed meanwhile."""
    with request.app[SERVICE].connections.serving(request.protocol):
        return await handler(request)


async def give_up_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Tell the client, in the head of an answer, that a leaving gateway takes no further request."""
    if request.app[SERVICE].admission.is_draining:
        response.force_close()
        response.headers[CONNECTION] = "close"
