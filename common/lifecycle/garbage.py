"""How often Python looks for cycles of garbage, and never among what lives as long as the process."""

import gc

YOUNG_OBJECTS = 5_000
"""So many new objects are waited for: a look at them takes 2 to 5 ms of a gateway that refuses. With 50,000 it took 64,
and in all twice as much, as they were out of the core's cache by then; with 700, as Python has it, a gateway spent 8 %
of its time on looking."""

OLDER = 2
"""Every third look goes one generation further. Requests live long enough to become old: when only one look in a
thousand went so far, their cycles were never found, and a gateway grew by 6 MB a minute at 230 requests per second."""


def settle() -> None:
    """Leave what is there now out of every later look; called once, when the process has started."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is old anew: Python looks at that only when it has grown by a quarter
    gc.set_threshold(YOUNG_OBJECTS, OLDER, OLDER)
