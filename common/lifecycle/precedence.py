"""Who goes first where threads want the same core. On Linux niceness belongs to a thread, not to its process."""

import logging
import os
import sys

logger = logging.getLogger(__name__)

LARGEST_NICENESS = 19


def let_others_go_first(by: int) -> None:
    """Make the calling thread nicer by so much, and with it the threads that it starts from now on.

    Nothing happens where niceness is a matter of whole processes. A system that refuses is logged: work goes on.
    """
    if by == 0 or sys.platform != "linux":
        return
    try:
        niceness = min(LARGEST_NICENESS, os.getpriority(os.PRIO_PROCESS, 0) + by)  # 0: this thread
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    except OSError as error:
        logger.warning("this thread cannot let others go first: %s", error)
