"""How much memory this process can still get: the host's, or what its control group leaves."""

import psutil

from common.lifecycle.cgroup import memory_left_bytes


def available_memory_bytes() -> int:
    """Return the bytes that can be taken without swapping or being killed."""
    of_host = int(psutil.virtual_memory().available)
    of_group = memory_left_bytes()
    return of_host if of_group is None else min(of_host, of_group)
