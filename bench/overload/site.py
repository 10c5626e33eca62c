"""The cluster that is overloaded: several gateways on one port, a random model, a key per tenant."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.api_keys.file_store import FileKeyStore
from common.api_keys.secret import digest_of, new_key
from common.messages.ids import TenantId
from common.messages.tenant import ApiKey, TenantLimits
from tests.support.cluster import Cluster
from tests.support.tiny_models import write_tiny_llama

MODEL = "random"
GENEROUS = TenantLimits(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrent=10**5)
"""Limits that refuse nobody, and that Redis is asked for with every request all the same."""


@dataclass(frozen=True, slots=True)
class Site:
    """A running cluster and the keys of its tenants, by their names."""

    cluster: Cluster
    keys: dict[str, str]

    def gateways_rss(self) -> dict[int, int]:
        """Return the bytes of memory of each gateway, by its pid."""
        rows = self.cluster.status()["processes"]
        pids = [row["pid"] for row in rows if row["name"].startswith("gateway-")]
        return {pid: psutil.Process(pid).memory_info().rss for pid in pids}


@asynccontextmanager
async def running_site(folder: Path, tenants: Sequence[str], num_gateways: int, *options: str) -> AsyncIterator[Site]:
    """Run it while entered. `options` are flags of `tandem up`."""
    model = write_tiny_llama(folder / "model", hidden=256, num_layers=4, intermediate=512, max_position=8192)
    keys = {name: new_key() for name in tenants}
    store = FileKeyStore(folder / "keys.json")
    for name, key in keys.items():
        await store.put(ApiKey(TenantId(name), name, digest_of(key), int(time.time()), GENEROUS))
    common = ["--model", str(model), "--served-name", MODEL, "--dtype", "float32", "--gateways", str(num_gateways)]
    cluster = Cluster(folder / "state", [*common, "--api-keys-file", str(folder / "keys.json"), *options])
    cluster.start()
    try:
        yield Site(cluster, keys)
    finally:
        cluster.stop()
