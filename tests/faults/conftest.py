"""One model, one table: fault tests share what they compare with, and their times are printed at the end."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fault_cluster import FaultCluster, Shape, running_faults
from tests.support.fault_model import write_fault_model
from tests.support.fault_stages import Stage, Undisturbed, undisturbed
from tests.support.fault_table import Absent, Table

TABLE_FILE = "FAULT_TABLE"
"""Environment variable: where the table is written as JSON."""

ABSENT = {
    ("message lost", "redis"): "a command is answered or its connection is gone: rows of silence and of restarts",
}
"""Rows that make no sense, and why."""

_TABLE = pytest.StashKey[Table]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TABLE] = Table()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash[_TABLE]
    if not (table.cells or table.targets):
        return
    terminalreporter.section("recovery times of the fault matrix")
    table.absent = [Absent(*row, stage, reason) for row, reason in ABSENT.items() for stage in Stage]
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_cluster(tmp_path_factory: pytest.TempPathFactory, fault_model: Path) -> AsyncIterator[FaultCluster]:
    """Two processes of each kind."""
    shape = Shape(num_prefill=2, num_decode=2, num_gateways=2)
    async with running_faults(tmp_path_factory.mktemp("cluster"), fault_model, shape) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(shared_cluster: FaultCluster) -> Undisturbed:
    """What clients get when nothing happens."""
    return await undisturbed(shared_cluster)


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(shared_cluster: FaultCluster, plain: Undisturbed) -> AsyncIterator[FaultCluster]:
    """The cluster, whole; a test that has failed leaves nothing to the next one."""
    yield shared_cluster
    await shared_cluster.repair()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def one_prefill_worker(shared_cluster: FaultCluster) -> AsyncIterator[str]:
    """Leave one prefill worker, which then has all prefills."""
    left, gone = "prefill-0", "prefill-1"
    shared_cluster.absent.add(gone)
    await shared_cluster.processes[gone].end()
    await shared_cluster.until_known_dead(gone)
    yield left
    shared_cluster.absent.remove(gone)
    await shared_cluster.repair()
