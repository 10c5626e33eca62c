"""Names under which handlers find what belongs to the application and to the request."""

from aiohttp import web

from common.broker.limits import Quota
from common.messages.ids import RequestId
from gateway.callers import Caller
from gateway.service import Service
from gateway.spans import RequestSpan
from gateway.sse import EventStream
from gateway.vllm_aliases import VllmAliases

SERVICE = web.AppKey("SERVICE", Service)
VLLM_ALIASES = web.AppKey("VLLM_ALIASES", VllmAliases)
"""Present if the metrics are wanted under vLLM's names too."""

REQUEST_ID: web.RequestKey[RequestId] = web.RequestKey("REQUEST_ID", str)  # type: ignore[arg-type]  # a NewType is no class
ARRIVED_S = web.RequestKey("ARRIVED_S", float)
"""When the request's head was read, on the monotonic clock."""

CALLER = web.RequestKey("CALLER", Caller)
"""Who has sent the request; anyone at an open route."""

QUOTA = web.RequestKey("QUOTA", Quota)
"""Present once the limits of the caller were asked."""

EVENT_STREAM = web.RequestKey("EVENT_STREAM", EventStream)
"""Present once the request is answered by events, so that errors become an event too."""

SPAN = web.RequestKey("SPAN", RequestSpan)
"""Present for every POST."""

ERROR_CODE = web.RequestKey("ERROR_CODE", str)
"""Present once the request has failed through no fault of its client."""
