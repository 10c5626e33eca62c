"""What the compose file tells each process are settings of it, and every one works if nobody sets anything else."""

import re
from typing import Any

import pytest
import yaml

from common.settings.gateway import GatewayProcessSettings
from common.settings.parse import parse
from common.settings.setting import variable_of
from common.settings.worker import WorkerSettings
from tests.support.source_tree import ROOT

SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
SECRET = "0" * 64
PROCESSES = [name for name in SERVICES if name != "redis"]


def _environment(service: str) -> dict[str, str]:
    """What the process gets from a `.env` that has the secret alone."""
    values = SERVICES[service]["environment"]
    return {name: re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", _value, text) for name, text in values.items()}


def _value(match: re.Match[str]) -> str:
    return SECRET if match[1] == "TANDEM_SECRET" else match[2]


@pytest.mark.parametrize("service", PROCESSES)
def test_all_that_is_told_is_a_setting_and_works(service: str) -> None:
    settings_class = GatewayProcessSettings if service == "gateway" else WorkerSettings
    environment = _environment(service)
    assert set(environment) <= {variable_of(field) for field in settings_class.__dataclass_fields__.values()}
    settings = parse(settings_class, [], environment, service)
    assert settings.redis_url is not None
    assert SECRET in settings.redis_url


def test_the_gateway_has_the_defaults_of_the_settings() -> None:
    settings = parse(GatewayProcessSettings, [], _environment("gateway"), "gateway")
    plain = parse(GatewayProcessSettings, [], {"TANDEM_SECRET": SECRET}, "gateway")
    own = {"redis_url", "allow_anonymous", "socket_dir"}
    fields = set(GatewayProcessSettings.__dataclass_fields__) - own
    assert {name: getattr(settings, name) for name in fields} == {name: getattr(plain, name) for name in fields}


def test_processes_have_longer_to_stop_than_requests_to_finish() -> None:
    for service in PROCESSES:
        assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) > float(
            _environment(service)["TANDEM_DRAIN_S"]
        )
