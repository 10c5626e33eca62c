"""`x-ratelimit-*` as OpenAI has them, what a caller has left of its minute: headers of HTTP, metadata of gRPC."""

from common.broker.limits import Allowance, Quota


def quota_fields(quota: Quota) -> dict[str, str]:
    """Return the fields of the limits that there are."""
    return _fields("requests", quota.requests) | _fields("tokens", quota.tokens)


def _fields(name: str, allowance: Allowance | None) -> dict[str, str]:
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
