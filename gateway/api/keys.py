"""Names under which handlers find what belongs to the application and to the request."""

from aiohttp import web

from common.messages.ids import RequestId
from gateway.service import Service
from gateway.sse import EventStream

SERVICE = web.AppKey("SERVICE", Service)

REQUEST_ID: web.RequestKey[RequestId] = web.RequestKey("REQUEST_ID", str)  # type: ignore[arg-type]  # a NewType is no class
ARRIVED_S = web.RequestKey("ARRIVED_S", float)
"""When the request's head was read, on the monotonic clock."""

EVENT_STREAM = web.RequestKey("EVENT_STREAM", EventStream)
"""Present once the request is answered by events, so that errors become an event too."""
