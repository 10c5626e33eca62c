"""Processor, memory and GPU."""

import shutil
import subprocess
from collections.abc import Iterator

import psutil

from common.lifecycle.cgroup import cpu_quota
from common.lifecycle.cores import available_cores, num_usable_cores
from common.lifecycle.cpu_flags import cpu_flags
from common.lifecycle.memory import available_memory_bytes
from tandem.doctor.finding import Finding, Verdict, found

INTERESTING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
LEAST_MEMORY_BYTES = 2 << 30
"""Two workers with the bundled model in float32 take 1.7 GB by the estimate of `preflight`."""

SMI_TIMEOUT_S = 10.0
SMI_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def look_at_hardware() -> Iterator[Finding]:
    """Yield what the machine has."""
    cores, quota = available_cores(), cpu_quota()
    usable = num_usable_cores(len(cores), quota)
    yield Finding("cores", f"{len(cores)} ({_ranges(cores)})")
    yield Finding("cpu quota", "none" if quota is None else f"{quota:g} cores (control group)")
    few = Verdict.OK if usable >= 2 else Verdict.OPTIONAL
    yield Finding("usable cores", str(usable), few, "" if usable >= 2 else "prefill and decode share one core")
    flags = cpu_flags()
    yield found(
        "vector units",
        " ".join(flag for flag in INTERESTING_FLAGS if flag in flags),
        "without AVX2 or better, models run slowly on the CPU",
    )
    available = available_memory_bytes()
    enough = available >= LEAST_MEMORY_BYTES
    yield Finding(
        "memory",
        f"{available / (1 << 30):.1f} GiB available of {psutil.virtual_memory().total / (1 << 30):.1f} GiB",
        Verdict.OK if enough else Verdict.MISSING,
        "" if enough else "two workers with the bundled model need about 2 GiB",
    )
    yield found("gpu", gpus(), "models run on the CPU")


def gpus() -> str | None:
    """Return the GPUs that the driver knows, None without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            (program, *SMI_QUERY), capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(line.strip() for line in answer.stdout.splitlines() if line.strip())


def _ranges(cores: tuple[int, ...]) -> str:
    """Return 0-3,6 for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
