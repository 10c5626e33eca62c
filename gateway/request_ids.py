"""Names of requests: a random one of our own, and the client's, which is only echoed."""

import re
import secrets

from common.messages.ids import RequestId

HEADER = "x-request-id"

_PUBLIC = re.compile(r"(?:chatcmpl-|cmpl-|resp_)?(?P<own>[0-9a-f]{32})")
_ECHOED = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> RequestId:
    """Return a random 128-bit id."""
    return RequestId(secrets.token_hex(16))


def part_of(request: RequestId, index: int) -> RequestId:
    """Return the name of the engine's request for prompt number `index`; the first has the request's own."""
    return RequestId(f"{request}-{index}") if index else request


def whole_of(part: RequestId) -> RequestId:
    """Return the request that a part belongs to."""
    return RequestId(part.partition("-")[0])


def request_of(public: str) -> RequestId | None:
    """Return the request that a client names by the id of its response, with or without the prefix; None: nonsense."""
    match = _PUBLIC.fullmatch(public)
    return None if match is None else RequestId(match["own"])


def echoed_id(sent: str | None, own: RequestId) -> str:
    """Return the client's id if it is short and harmless in headers and logs, else our own."""
    return sent if sent is not None and _ECHOED.fullmatch(sent) else own
