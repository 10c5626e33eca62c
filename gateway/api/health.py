"""`GET /health/live` and `GET /health/ready`: this process is not broken; a request could be served now.

The second is proven: tokens have come back from a decode worker within the last interval (`gateway.canary`).
"""

from aiohttp import web

from gateway.api.errors import json_response
from gateway.api.keys import SERVICE
from gateway.schemas.health import Health


async def live(http: web.Request) -> web.Response:
    """Answer 200: whoever can answer is alive."""
    return json_response(Health("live"))


async def ready(http: web.Request) -> web.Response:
    """Answer 200 if a request could be served, else 503 with the reason."""
    service = http.app[SERVICE]
    if service.admission.is_draining:
        return _not_ready("draining")
    readiness = service.engine.readiness()
    return json_response(Health("ready")) if readiness.is_ready else _not_ready(readiness.reason)


def _not_ready(reason: str) -> web.Response:
    return json_response(Health("not ready", reason), status=503, headers={"Retry-After": "1"})
