"""Memory and open files of every process of a soak over its life, and whether they stay flat."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support.fault_cluster import REDIS, FaultCluster

LOOK_S = 2.0
SHORTEST_LIFE_S = 120.0
"""Shorter lives are still warming up in their second quarter."""

MAX_GROWTH = 0.05
MAX_GROWTH_BYTES = 8 << 20
MAX_MORE_FILES = 16
"""Pools of connections keep what they once needed. Redis has an end of all of them."""

MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A look at a process (`at_s`: since the first look)."""

    at_s: float
    rss_bytes: int
    num_files: int


@dataclass(eq=False)
class Life:
    """Everything seen of one process from its start to its end."""

    name: str
    pid: int
    max_more_files: int = MAX_MORE_FILES
    samples: list[Sample] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """How long it was looked at."""
        return self.samples[-1].at_s - self.samples[0].at_s

    @property
    def is_long(self) -> bool:
        """Whether it tells something about growth."""
        return self.duration_s >= SHORTEST_LIFE_S

    def middle(self, quarter: int) -> Sample:
        """Return the medians of a quarter (0..3) of its life."""
        begin = self.samples[0].at_s + self.duration_s * quarter / 4
        end = begin + self.duration_s / 4
        part = [sample for sample in self.samples if begin <= sample.at_s <= end]
        rss = statistics.median_low(sample.rss_bytes for sample in part)
        return Sample(begin, rss, statistics.median_low(sample.num_files for sample in part))

    def growth(self) -> str | None:
        """Return what has grown from the second to the last quarter, None if nothing has."""
        early, late = self.middle(1), self.middle(3)
        if late.rss_bytes - early.rss_bytes > MAX_GROWTH * early.rss_bytes + MAX_GROWTH_BYTES:
            return f"RSS from {early.rss_bytes / MIB:.1f} to {late.rss_bytes / MIB:.1f} MiB"
        if late.num_files - early.num_files > self.max_more_files:
            return f"open files from {early.num_files} to {late.num_files}"
        return None

    def by_minute(self) -> list[float]:
        """Return the median RSS of each minute in MiB."""
        minutes: dict[int, list[int]] = {}
        for sample in self.samples:
            minutes.setdefault(int((sample.at_s - self.samples[0].at_s) // 60), []).append(sample.rss_bytes)
        return [round(statistics.median_low(each) / MIB, 1) for each in minutes.values()]

    def summary(self) -> Mapping[str, Any]:
        """Return what a report says of it."""
        late = self.middle(3)
        return {
            "name": self.name,
            "pid": self.pid,
            "life_s": round(self.duration_s),
            "rss_mib_by_minute": self.by_minute(),
            "files": late.num_files,
            "grown": self.growth() if self.is_long else None,
        }


class Vitals:
    """Looks at all processes of a cluster."""

    def __init__(self, cluster: FaultCluster) -> None:
        self._cluster = cluster
        self._started = time.monotonic()
        self.lives: dict[int, Life] = {}

    async def watch(self) -> None:
        """Look again and again until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take a sample of every process that lives."""
        for name, pid in self._living():
            try:
                process = psutil.Process(pid)
                sample = Sample(time.monotonic() - self._started, process.memory_info().rss, process.num_fds())
            except psutil.Error:
                continue  # it has just ended
            if pid not in self.lives:
                num_pools = len(self._cluster.processes) if name == REDIS else 1
                self.lives[pid] = Life(name, pid, MAX_MORE_FILES * num_pools)
            self.lives[pid].samples.append(sample)

    def long_lives(self) -> list[Life]:
        """Return those that tell something about growth."""
        return [life for life in self.lives.values() if life.is_long]

    def _living(self) -> Iterator[tuple[str, int]]:
        return ((name, each.pid) for name, each in self._cluster.processes.items() if each.is_running)
