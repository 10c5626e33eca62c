"""`GET /metrics`: the Prometheus text format."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from gateway.api.keys import SERVICE, VLLM_ALIASES


async def show_metrics(http: web.Request) -> web.Response:
    """Show every metric of this process."""
    if VLLM_ALIASES in http.app:
        await http.app[VLLM_ALIASES].ensure()
    body = generate_latest(http.app[SERVICE].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
