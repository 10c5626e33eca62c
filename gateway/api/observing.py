"""Around every request: its id, its clock, its span, and the count of its answer."""

import time

from aiohttp import web

from common.telemetry.logs import request_id
from gateway.api.errors import Handler
from gateway.api.keys import ARRIVED_S, ERROR_CODE, REQUEST_ID, SERVICE, SPAN
from gateway.request_ids import HEADER, echoed_id, new_request_id
from gateway.spans import http_span

CLIENT_GONE = 499
"""What nginx logs when a client closes its connection before the answer."""


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request inside its span; its id is in every log line of its task."""
    request[ARRIVED_S] = time.monotonic()
    request[REQUEST_ID] = new_request_id()
    request_id.set(request[REQUEST_ID])  # aiohttp serves each request in a task, so in a context, of its own
    route = _route_of(request)
    if request.method == "POST":
        request[SPAN] = http_span(request[REQUEST_ID], request, route)
    status = CLIENT_GONE
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        request.app[SERVICE].metrics.note_answer(route, status)
        if SPAN in request:
            request[SPAN].end(status, "aborted" if status == CLIENT_GONE else request.get(ERROR_CODE, ""))


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request in its response's head."""
    own = request.get(REQUEST_ID) or new_request_id()
    response.headers[HEADER] = echoed_id(request.headers.get(HEADER), own)


def _route_of(request: web.Request) -> str:
    """Return the template of the path, never the path itself; "" if nothing matches."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical
