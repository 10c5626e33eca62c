"""A gateway process: what its settings become for its HTTP side, and what keeps its view of the cluster up to date."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.api_keys.secret import new_key
from common.errors import AuthenticationFailed, InvalidSetting, Unavailable
from common.messages.ids import GatewayId
from common.settings.gateway import GatewayProcessSettings
from common.telemetry.metrics import GatewayMetrics
from gateway.entrance import open_entrance
from gateway.process import http_settings, open_cluster, start_gateway
from gateway.roster import Roster
from tests.support.polling import until


@pytest.mark.parametrize(("given", "becomes"), [(600.0, 600.0), (0.5, 0.5), (0.0, None)])
def test_a_deadline_of_zero_is_none(given: float, becomes: float | None) -> None:
    settings = GatewayProcessSettings(secret="a secret for tests", deadline_s=given)
    assert http_settings(settings).deadline_s == becomes


def test_b139_a_gateway_without_keys_does_not_start_for_other_hosts() -> None:
    with pytest.raises(InvalidSetting, match=r"host='0\.0\.0\.0': other hosts reach it, and nobody would need"):
        start_gateway(GatewayProcessSettings(secret="a secret for tests", host="0.0.0.0"))


async def test_a_gateway_does_not_start_with_keys_that_it_cannot_read(tmp_path: Path) -> None:
    settings = GatewayProcessSettings(secret="a secret for tests", api_keys_file=tmp_path / "nowhere")
    with pytest.raises(InvalidSetting, match=r"api_keys_file=.*No such file"):
        async with open_entrance(settings):
            pass


async def test_a_gateway_starts_while_redis_keeps_its_keys_to_itself() -> None:
    settings = GatewayProcessSettings(secret="a secret for tests", api_keys="redis", redis_url="redis://127.0.0.1:1/0")
    async with open_entrance(settings) as entrance:
        with pytest.raises(Unavailable, match="cannot be checked"):
            await entrance.door.caller([f"Bearer {new_key()}"])
        with pytest.raises(AuthenticationFailed):
            await entrance.door.caller([])


async def test_a_mistake_that_ends_the_view_of_the_cluster_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refresh(roster: Roster) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Roster, "refresh", refresh)
    settings = GatewayProcessSettings(secret="a secret for tests", redis_url="redis://127.0.0.1:1/0")
    async with open_cluster(GatewayId("g"), settings, GatewayMetrics(CollectorRegistry())):
        await until(lambda: "roster ended by a mistake of ours" in caplog.text, "a line in the log")
