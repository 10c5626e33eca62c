"""The README's configuration table names every setting with the default that the code has."""

import dataclasses
import re

import pytest

from common.settings.engine import EngineSettings
from common.settings.gateway import GatewayProcessSettings
from common.settings.process import ProcessSettings
from common.settings.setting import variable_of
from common.settings.worker import WorkerSettings
from tandem.cluster.settings import UpSettings
from tests.support.source_tree import ROOT

# A variable that several processes read stands once, with the default of the first of them.
SETTINGS_CLASSES = (ProcessSettings, EngineSettings, GatewayProcessSettings, WorkerSettings, UpSettings)


def _documented() -> dict[str, str]:
    """Default cell by variable."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`TANDEM_[^|]*) \| ([^|]*) \|", readme, re.MULTILINE)
    return {variable: default.strip("`") for names, default in rows for variable in re.findall(r"\w+", names)}


def _expected() -> dict[str, str]:
    defaults: dict[str, str] = {}
    for settings_class in SETTINGS_CLASSES:
        for field in dataclasses.fields(settings_class):
            defaults.setdefault(variable_of(field), _cell(field.default))
    return defaults


def _cell(default: object) -> str:
    match default:
        case None:
            return "auto"
        case bool():
            return "on" if default else "off"
        case "" | ():
            return "none"
        case _:
            return str(default)


@pytest.mark.parametrize("variable", sorted(_expected()))
def test_each_setting_is_documented(variable: str) -> None:
    assert _documented().get(variable) == _expected()[variable]


def test_no_setting_is_invented() -> None:
    assert set(_documented()) <= set(_expected())
