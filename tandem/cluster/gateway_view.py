"""Asks each gateway of this host about itself, by the socket of its own: their port may belong to several."""

import asyncio
from collections import defaultdict
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from common.settings.gateway import own_socket_in
from tandem.cluster.child import ChildRole
from tandem.cluster.gateway_probe import PROBE_TIMEOUT_S, is_ready
from tandem.cluster.report import GatewayView, HandoverReport
from tandem.cluster.state import ClusterState

URL = "http://gateway"


async def view_gateways(state: ClusterState) -> dict[str, GatewayView]:
    """Return what the running gateways say, by name."""
    gateways = {
        entry.name: own_socket_in(Path(state.run_dir), entry.ref.pid)
        for entry in state.processes
        if entry.role == ChildRole.GATEWAY and entry.ref is not None
    }
    return dict(zip(gateways, await asyncio.gather(*map(_view, gateways.values())), strict=True))


async def _view(socket: Path) -> GatewayView:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session:
        return GatewayView(await is_ready(session, URL), await _handover(session))


async def _handover(session: aiohttp.ClientSession) -> HandoverReport | None:
    try:
        async with session.get(f"{URL}/metrics", timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)) as response:
            text = await response.text()
            return handover_in(text) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


def handover_in(metrics: str) -> HandoverReport:
    """Return the counts in a gateway's metrics, over all labels."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return HandoverReport(
        placements=int(totals["tandem_placements_total"]),
        failovers=int(totals["tandem_failovers_total"]),
        stale=int(totals["tandem_stale_messages_total"]),
    )
