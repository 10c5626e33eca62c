"""Limits of the control group that this process lives in (versions 1 and 2), the tightest of all its ancestors.

Containers mount their own group at the root, hosts do not: every directory from the process's group up to the mount
point is looked at, and those that do not exist are passed over.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")

_UNLIMITED_BYTES = 1 << 60
"""Version 1 spells "no limit" as a number near 2^63."""


def cpu_quota(mount: Path = MOUNT, membership: Path = SELF) -> float | None:
    """Return how many cores' worth of time the group may use, None if it is not limited."""
    quotas = [
        quota
        for group in _groups("cpu", mount, membership)
        for quota in (_cpu_max(group / "cpu.max"), _cfs_quota(group))
        if quota is not None
    ]
    return min(quotas, default=None)


def memory_left_bytes(mount: Path = MOUNT, membership: Path = SELF) -> int | None:
    """Return how many more bytes the group may take, None if it is not limited. Page cache counts as free."""
    left = [
        remainder
        for group in _groups("memory", mount, membership)
        for remainder in (
            _memory_left(group, "memory.max", "memory.current", "inactive_file"),
            _memory_left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if remainder is not None
    ]
    return min(left, default=None)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """Yield the directories that may limit this process, innermost first, for both versions."""
    for controllers, group in _memberships(membership):
        is_version_2 = controllers == [""]
        if not is_version_2 and controller not in controllers:
            continue
        root = mount if is_version_2 else _version_1_root(mount, controller, controllers)
        path = PurePosixPath("/" + group.lstrip("/"))
        for level in (path, *path.parents):
            yield root / str(level).lstrip("/")


def _version_1_root(mount: Path, controller: str, controllers: list[str]) -> Path:
    joint = mount / ",".join(controllers)
    return joint if joint.is_dir() else mount / controller


def _memberships(membership: Path) -> list[tuple[list[str], str]]:
    rows = (line.split(":", 2) for line in (_text(membership) or "").splitlines())
    return [(row[1].split(","), row[2]) for row in rows if len(row) == 3]


def _cpu_max(file: Path) -> float | None:
    words = (_text(file) or "").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _cfs_quota(group: Path) -> float | None:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _memory_left(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit, usage = _number(group / limit_file), _number(group / usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED_BYTES:
        return None
    rows = (line.split() for line in (_text(group / "memory.stat") or "").splitlines())
    cached = next((int(row[1]) for row in rows if len(row) == 2 and row[0] == cache_key), 0)
    return max(0, limit - usage + cached)


def _number(file: Path) -> int | None:
    words = (_text(file) or "").split()
    if len(words) != 1 or not words[0].lstrip("-").isdigit():
        return None
    return int(words[0])


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return None
