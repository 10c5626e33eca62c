"""Event loops of the integration tests: asyncio's own, unless a module names others in `LOOP_FACTORIES`."""

import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    module = item.getparent(pytest.Module)
    assert module is not None
    factories: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = getattr(
        module.obj, "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop}
    )
    return factories
