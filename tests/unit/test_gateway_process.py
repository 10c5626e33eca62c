"""A gateway process: what its settings become for its HTTP side, and what keeps its view of the cluster up to date."""

import pytest
from prometheus_client import CollectorRegistry

from common.messages.ids import GatewayId
from common.settings.gateway import GatewayProcessSettings
from common.telemetry.metrics import GatewayMetrics
from gateway.process import http_settings, open_cluster
from gateway.roster import Roster
from tests.support.polling import until


@pytest.mark.parametrize(("given", "becomes"), [(600.0, 600.0), (0.5, 0.5), (0.0, None)])
def test_a_deadline_of_zero_is_none(given: float, becomes: float | None) -> None:
    settings = GatewayProcessSettings(secret="a secret for tests", deadline_s=given)
    assert http_settings(settings).deadline_s == becomes


async def test_a_mistake_that_ends_the_view_of_the_cluster_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refresh(roster: Roster) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Roster, "refresh", refresh)
    settings = GatewayProcessSettings(secret="a secret for tests", redis_url="redis://127.0.0.1:1/0")
    async with open_cluster(GatewayId("g"), settings, GatewayMetrics(CollectorRegistry())):
        await until(lambda: "roster ended by a mistake of ours" in caplog.text, "a line in the log")
