"""What an error of a request leaves behind besides its answer: one line in the log, and counts."""

import logging

from common.errors import RateLimited, RequestError, TandemError
from common.telemetry.metrics import GatewayMetrics
from gateway.problems import Problem, refusal_of

logger = logging.getLogger(__name__)


def note_error(metrics: GatewayMetrics, error: Exception, problem: Problem) -> bool:
    """Log the error and count it; return whether it was no fault of the client: then its code is one of our own."""
    refusal = refusal_of(error)
    if refusal is not None:
        metrics.note_refusal(refusal)
    match error:
        case RequestError() | RateLimited():
            logger.info("request refused: %s", type(error).__name__)
            return False
        case TandemError():
            logger.warning("request failed: %s: %s", type(error).__name__, error)
        case _:
            logger.error("request failed by a mistake of ours", exc_info=error)
    metrics.failures.labels(code=problem.code).inc()
    return True
