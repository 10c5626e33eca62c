"""`x-ratelimit-*` as OpenAI has them: what the caller has left of its minute, told with whatever asked its limits."""

from aiohttp import web

from common.broker.limits import Allowance, Quota
from gateway.api.keys import QUOTA


async def tell_quota(request: web.Request, response: web.StreamResponse) -> None:
    """Tell in the head of an answer what its tenant has left."""
    quota = request.get(QUOTA)
    if quota is not None:
        response.headers.update(quota_headers(quota))


def quota_headers(quota: Quota) -> dict[str, str]:
    """Return the headers of the limits that there are."""
    return _headers("requests", quota.requests) | _headers("tokens", quota.tokens)


def _headers(name: str, allowance: Allowance | None) -> dict[str, str]:
    if allowance is None:
        return {}
    return {
        f"x-ratelimit-limit-{name}": str(allowance.limit),
        f"x-ratelimit-remaining-{name}": str(allowance.remaining),
        f"x-ratelimit-reset-{name}": duration_text(allowance.reset_s),
    }


def duration_text(seconds: float) -> str:
    """Return a duration as OpenAI writes it: "120ms", "7.66s", "1m0s"."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    rest = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
