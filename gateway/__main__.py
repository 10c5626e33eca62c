"""Entry of a gateway process: `python -m gateway`."""

import os
import sys

from common.lifecycle.exit_codes import run_process
from common.settings.gateway import GatewayProcessSettings
from common.settings.parse import parse
from gateway.process import start_gateway


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return start_gateway(parse(GatewayProcessSettings, sys.argv[1:], os.environ, "python -m gateway"))


if __name__ == "__main__":
    run_process(main)
