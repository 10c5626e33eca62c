"""Entry of a prefill worker process: `python -m prefill_worker`."""

from common.lifecycle.exit_codes import run_process
from common.runtime.process import start_worker


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return start_worker("prefill_worker")


if __name__ == "__main__":
    run_process(main)
