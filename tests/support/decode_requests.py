"""Requests for a decode scheduler without a model, drawn by hypothesis, and what their clients must be told."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from common.messages.ids import BlockId
from common.scheduling.sequence import FinishReason, Sequence
from decode_worker.ticket import Intake

BLOCK_SIZE = 2
NUM_BLOCKS = 8
CAPACITY = BLOCK_SIZE * NUM_BLOCKS


@dataclass(frozen=True)
class Request:
    """`shown` says how many tokens of each open choice an earlier placement has shown."""

    prompt: list[int]
    shown: dict[int, int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    salt: str
    wants: Intake
    is_failover: bool
    runs_alone: bool
    asks: bool
    """For logprobs, of the prompt as well."""


REQUESTS = st.builds(
    Request,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6)
    | st.lists(st.integers(0, 1), min_size=7, max_size=CAPACITY + 2),
    shown=st.builds(dict, st.just({0: 0}))
    | st.dictionaries(st.integers(0, 3), st.just(0) | st.integers(0, 3) | st.integers(0, 9), min_size=1, max_size=4),
    max_tokens=st.sampled_from([1, 2, 20]),
    stop_ids=st.sampled_from([(), (), (0,), (1, 2)]),
    salt=st.sampled_from(["", "", "", "a"]),
    wants=st.sampled_from([Intake.LOCAL, Intake.LOCAL, Intake.REMOTE]),
    is_failover=st.booleans(),
    runs_alone=st.sampled_from([False, False, True]),
    asks=st.booleans(),
)


@dataclass
class Stream:
    """What one client has been told, and what it must be told in the end."""

    sequence: Sequence
    wants: Intake
    expected: list[int]
    reason: FinishReason
    shown: list[int] = field(default_factory=list)
    is_reserved: bool = False
    receiving: list[BlockId] = field(default_factory=list)

    @property
    def age(self) -> tuple[int, int]:
        return self.sequence.arrival, self.sequence.key.choice

    @property
    def num_own(self) -> int:
        """Blocks that a choice has to have for itself, for its tokens and one more."""
        num_tokens, num_prompt = self.sequence.num_tokens, self.sequence.num_prompt
        return -(-(num_tokens + 1) // BLOCK_SIZE) - min(num_prompt, num_tokens - 1) // BLOCK_SIZE

    @property
    def num_to_begin(self) -> int:
        """As many of these as it needs for the prompt and one more token."""
        num_tokens, num_prompt = self.sequence.num_tokens, self.sequence.num_prompt
        return -(-(num_prompt + 1) // BLOCK_SIZE) - min(num_prompt, num_tokens - 1) // BLOCK_SIZE


@dataclass
class Group:
    """The choices of one request."""

    prompt: list[int]
    leader: Stream
    asks_prompt: bool
    has_prompt: bool = False
    """Whether the leader has computed it: until then the others follow."""
