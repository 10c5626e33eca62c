"""What the process settings of a gateway become for its HTTP side."""

import pytest

from common.settings.gateway import GatewayProcessSettings
from gateway.process import http_settings


@pytest.mark.parametrize(("given", "becomes"), [(600.0, 600.0), (0.5, 0.5), (0.0, None)])
def test_a_deadline_of_zero_is_none(given: float, becomes: float | None) -> None:
    settings = GatewayProcessSettings(secret="a secret for tests", deadline_s=given)
    assert http_settings(settings).deadline_s == becomes
