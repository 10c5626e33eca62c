"""Model of what workers tell about a request: tokens that know what they were computed from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.streams import Ending, Source
from proto import worker_pb2 as pb


class Vocabulary:
    """Token ids that know what they were computed from."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self.histories: list[tuple[int, tuple[int, ...]]] = []
        """By id: the choice, and the tokens before."""

    def token(self, choice: int, flavour: int, history: list[int]) -> int:
        """Return the token that follows a history."""
        key = (choice, flavour, tuple(history))
        if key not in self._ids:
            self._ids[key] = len(self.histories)
            self.histories.append((choice, key[2]))
        return self._ids[key]


@dataclass
class Author:
    """A decode worker that computes one placement: all that it has generated of each choice, shown tokens first."""

    flavour: int
    tokens: list[list[int]]
    done: set[int] = field(default_factory=set)
    is_done: bool = False


@dataclass
class Placement:
    """One placement as the workers see it. `ends_by` is the first word about its end that the gateway has heard."""

    number: int
    shown: list[list[int]]
    authors: dict[Source, Author] = field(default_factory=dict)
    acceptor: Source | None = None
    target: Source | None = None
    ends_by: type[Ending] | None = None


def logprobs_of(ids: Sequence[int]) -> list[pb.TokenLogprobs]:
    """Return logprobs by which each token is known."""
    return [pb.TokenLogprobs(logprob=-token, top_ids=[token], top_logprobs=[-token]) for token in ids]
