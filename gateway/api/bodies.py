"""Reading request bodies: JSON only, never compressed, never above the limit."""

from aiohttp import web
from aiohttp.hdrs import CONTENT_ENCODING, CONTENT_TYPE

from common.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """Return the whole body; raises `UnsupportedEncoding`, `BodyTooLarge` or `InvalidRequest`."""
    if request.headers.get(CONTENT_ENCODING, "identity").lower() != "identity":
        raise UnsupportedEncoding("Compressed bodies are not accepted.")
    if CONTENT_TYPE in request.headers and not _is_json(request.content_type):
        raise UnsupportedEncoding("The body must be `application/json`.", code="unsupported_media_type")
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(max_bytes) from error
    except web.RequestPayloadError as error:
        raise InvalidRequest("The body does not arrive as its headers say.") from error


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
