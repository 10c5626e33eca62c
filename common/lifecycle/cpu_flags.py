"""What the processor can compute with, as the kernel names it."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Either one makes a bfloat16 matrix product as fast as a float32 one, at half the memory traffic."""


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the flags of the first core, nothing where the system does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    rows = (line.partition(":") for line in lines)
    return next(
        (frozenset(values.split()) for key, _, values in rows if key.strip() in ("flags", "Features")), frozenset()
    )


def computes_bfloat16(flags: frozenset[str]) -> bool:
    """Return whether a processor with these flags computes in bfloat16 natively."""
    return not flags.isdisjoint(BFLOAT16_FLAGS)
