"""Entry of a decode worker process: `python -m decode_worker`."""

from common.lifecycle.exit_codes import run_process
from common.runtime.process import start_worker


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return start_worker("decode_worker")


if __name__ == "__main__":
    run_process(main)
