"""What clients of a fault cluster ask: completions of a tiny model, each known to the taps by a salt of its own."""

import secrets
from collections.abc import Mapping
from typing import Any

from tests.support.exchange import Exchange
from tests.support.fault_tap import SALT_PREFIX

MODEL = "tiny"


def completion(first: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a body whose prompt has `num_tokens` ids, told apart by `first`."""
    prompt = [3 + (first + 7 * position + position // 40) % 300 for position in range(num_tokens)]
    return {"model": MODEL, "prompt": prompt, "ignore_eos": True} | fields


def asking(url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Exchange:
    """Return a request that is not sent yet; no other one shares its prefixes."""
    salt = SALT_PREFIX + secrets.token_hex(8)
    return Exchange(url, "/v1/completions", {**body, "cache_salt": salt}, headers or {})
