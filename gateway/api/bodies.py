"""Reading request bodies: JSON only, never compressed, never above the limit."""

import asyncio

from aiohttp import web
from aiohttp.hdrs import CONTENT_ENCODING, CONTENT_TYPE

from common.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding
from gateway.api.keys import SERVICE


async def read_body(request: web.Request) -> bytes:
    """Return the whole body; raises `UnsupportedEncoding`, `BodyTooLarge` or `InvalidRequest`."""
    settings = request.app[SERVICE].settings
    max_bytes = settings.max_body_bytes
    if request.headers.get(CONTENT_ENCODING, "identity").lower() != "identity":
        raise UnsupportedEncoding("Compressed bodies are not accepted.")
    if CONTENT_TYPE in request.headers and not _is_json(request.content_type):
        raise UnsupportedEncoding("The body must be `application/json`.", code="unsupported_media_type")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(max_bytes) from error
    except TimeoutError as error:
        raise InvalidRequest("The body did not arrive in time.", code="request_timeout") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("The body does not arrive as its headers say.") from error


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
