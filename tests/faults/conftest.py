"""One model, one table: fault tests share what they compare with, and their times are printed at the end."""

import os
from pathlib import Path

import pytest

from tests.support.fault_model import write_fault_model
from tests.support.fault_table import Table

TABLE_FILE = "FAULT_TABLE"
"""Environment variable: where the table is written as JSON."""

_TABLE = pytest.StashKey[Table]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = Table()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[_TABLE]
    if not (table.cells or table.targets):
        return
    terminalreporter.section("recovery times of the fault matrix")
    for line in table.lines():
        terminalreporter.write_line(line)
    if os.environ.get(TABLE_FILE):
        table.write(Path(os.environ[TABLE_FILE]))


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> Table:
    """What is measured."""
    return pytestconfig.stash[_TABLE]


@pytest.fixture(scope="session")
def fault_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of every cluster here."""
    return write_fault_model(tmp_path_factory.mktemp("model") / "tiny")
