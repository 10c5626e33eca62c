"""The cores that this process may use: its affinity, cut down by its control group's quota of time."""

import os
from collections.abc import Sequence

from common.errors import InvalidSetting
from common.lifecycle.cgroup import cpu_quota


def available_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_usable_cores(num_cores: int, quota: float | None) -> int:
    """Return how many of `num_cores` cores can be busy at once under a quota (in cores), at least 1."""
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def usable_cores() -> int:
    """Return how many threads this process can keep busy."""
    return num_usable_cores(len(available_cores()), cpu_quota())


def pin_to(cores: Sequence[int]) -> None:
    """Keep this process on `cores`; nothing happens if there are none, or where the system cannot pin.

    Call it before the libraries that count cores are imported. Raises `InvalidSetting` for a core that is not ours.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise InvalidSetting("cpus", ",".join(map(str, cores)), f"not among {available_cores()}") from error
