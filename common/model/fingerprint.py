"""The digest that two workers must share before they may exchange pages."""

import hashlib
import json
from dataclasses import asdict

from common.cache.layout import KVLayout
from common.messages.ids import Fingerprint
from common.model.config import ModelConfig

PROTOCOL_VERSION = 2
"""Raise it whenever bind, announce, commit or the page header change their meaning."""

PAGE_LAYOUT = "block|layer|kv|head|token|dim"


def fingerprint(model_hash: str, config: ModelConfig, layout: KVLayout) -> Fingerprint:
    """Return the digest over weights, geometry, rope, KV dtype, block size, page layout and protocol version.

    The context limit is left out: it changes no page.
    """
    geometry = asdict(config)
    del geometry["max_context"]
    parts = {
        "model": model_hash,
        "geometry": geometry,
        "kv": asdict(layout),
        "layout": PAGE_LAYOUT,
        "protocol": PROTOCOL_VERSION,
    }
    return Fingerprint(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
