"""The names under which the hand-over tests know `polling`."""

from tests.support.polling import turns, until

eventually = until

__all__ = ["eventually", "turns"]
