"""Around every request: whoever sends it has shown a key, unless its route is one of the few that are open.

Denied by default: the open routes are listed here, and the route is the one that the router has found, never the text
of the path. Nobody learns without a key which other paths exist.
"""

import socket

from aiohttp import web
from aiohttp.hdrs import AUTHORIZATION

from common.telemetry.logs import tenant
from gateway.api.errors import Handler
from gateway.api.keys import CALLER, SERVICE
from gateway.callers import ANYONE

OPEN_ROUTES = frozenset({"/health/live", "/health/ready"})
METRICS_ROUTE = "/metrics"


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request of a known caller; raise `AuthenticationFailed` for others."""
    if is_open(request):
        request[CALLER] = ANYONE
        return await handler(request)
    caller = await request.app[SERVICE].entrance.door.caller(request.headers.getall(AUTHORIZATION, ()))
    request[CALLER] = caller
    tenant.set(caller.tenant)
    return await handler(request)


def is_open(request: web.Request) -> bool:
    """Return whether a request needs no key."""
    match = request.match_info
    resource = match.route.resource
    if match.http_exception is not None or resource is None:
        return False
    if resource.canonical == METRICS_ROUTE:
        return request.app[SERVICE].settings.open_metrics or _is_of_this_host(request)
    return resource.canonical in OPEN_ROUTES


def _is_of_this_host(request: web.Request) -> bool:
    """Whether it came through the socket of this very process, which only the owner of its folder can reach."""
    transport = request.transport
    connection = None if transport is None else transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX
