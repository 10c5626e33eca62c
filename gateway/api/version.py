"""`GET /version`."""

from aiohttp import web

from gateway.api.errors import json_response
from gateway.schemas.version import Version
from gateway.version import version


async def show_version(http: web.Request) -> web.Response:
    """Tell which Tandem this is."""
    return json_response(Version(version()))
