"""Starts a worker process: settings, cores and threads first, then everything that counts cores when it is imported."""

import asyncio
import importlib
import logging
import os
import sys
import threading

from common.lifecycle.cores import pin_to, usable_cores
from common.model.kernel_choice import choose_kernels
from common.runtime.engine import ENGINE_THREAD
from common.settings.parse import parse
from common.settings.worker import WorkerSettings
from common.telemetry.logs import setup_logging
from common.telemetry.traces import setup_tracing


def start_worker(package: str) -> int:
    """Run the worker of `package` ("prefill_worker", "decode_worker") until told to stop; returns the exit code."""
    settings = parse(WorkerSettings, sys.argv[1:], os.environ, f"python -m {package}")
    pin_to(settings.cpus)
    num_threads = settings.threads or usable_cores()
    if choose_kernels(settings.kernels, "cuda" if settings.device == "cuda" else "cpu") == "native":
        num_threads = 1  # of torch: what is left for it is small, and the kernels have threads of their own
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # A pool that spins on a busy core makes a step 20 times slower (3 s instead of 0.12 s measured at batch 1).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    instance = settings.worker_id or package
    setup_logging(instance, settings.log_level, fmt=settings.log_format)
    setup_tracing(package.replace("_", "-"), settings.otlp_endpoint, instance)
    import torch  # after the environment is set: its pools read it once

    torch.set_num_threads(num_threads)
    worker = importlib.import_module(f"{package}.worker")
    code: int = asyncio.run(worker.run(settings))
    return leave(code)


def leave(code: int) -> int:
    """Return the exit code, unless an engine is stuck in a step: then end the process at once.

    An ordinary exit waits for what the stuck call holds, for instance a device that does not answer.
    """
    if any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(code)
    return code
