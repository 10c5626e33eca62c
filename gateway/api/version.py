"""`GET /version`."""

import importlib.metadata

from aiohttp import web

from gateway.api.errors import json_response
from gateway.schemas.version import Version


async def show_version(http: web.Request) -> web.Response:
    """Tell which Tandem this is."""
    return json_response(Version(importlib.metadata.version("tandem")))
