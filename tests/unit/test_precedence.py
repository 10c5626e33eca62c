"""Letting others go first: one thread and those that it starts, and never a reason to fail."""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.lifecycle.precedence import LARGEST_NICENESS, let_others_go_first

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="niceness belongs to whole processes")


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def _niceness_after(by: int) -> tuple[int, int]:
    """Return that of a thread that lets others go first, and that of a thread that it starts."""

    def work() -> tuple[int, int]:
        let_others_go_first(by)
        with ThreadPoolExecutor(1) as heirs:
            return _niceness(), heirs.submit(_niceness).result()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@linux_only
def test_only_the_thread_and_its_heirs_become_nicer() -> None:
    before = _niceness()
    assert _niceness_after(3) == (before + 3, before + 3)
    assert _niceness() == before


@linux_only
def test_there_is_a_largest_niceness() -> None:
    assert _niceness_after(LARGEST_NICENESS + 1) == (LARGEST_NICENESS, LARGEST_NICENESS)


def test_nothing_happens_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "setpriority")
    let_others_go_first(0)


def test_nothing_happens_where_threads_have_no_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "setpriority")
    let_others_go_first(5)


@linux_only
def test_a_system_that_refuses_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING):
        let_others_go_first(5)
    assert "not here" in caplog.text
