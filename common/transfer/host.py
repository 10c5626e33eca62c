"""Which host this is, as far as shared memory is concerned."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return the kernel's boot id, or "" where there is none.

    It is the same in every container and namespace of one running kernel and differs between hosts and boots. Equal
    ids say that shared memory may work; only the handshake at the socket, which names the epoch, says that it does.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
