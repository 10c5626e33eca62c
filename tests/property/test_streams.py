"""A gateway's stream under frames of current and old placements, early copies, repetitions, gaps and divergences, in
any order: what is shown is one sequence, each token computed from exactly the tokens before it, and it ends once.

Each token of the model names the tokens that it was computed from. So a continuation that is stitched together from
two authors, or from two prefills of a near-tie, shows as a token with another history than the one before it.

Kills the planted bugs IDX_ONLY, NO_CHAIN, early-copy-anywhere, early-copy-of-another-stream, end-without-tokens,
gap-shown, lost-by-anybody, repetition-unchecked, second-acceptor, second-ending and source-ignored.
"""

import asyncio
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import WorkerLost
from common.messages.chain import chain_of
from common.messages.ids import Epoch, ModelName, RequestId, WorkerId
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, GenerateRequest, TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.streams import Ending, PlacementFailed, Source, Stream, StreamItem
from proto import worker_pb2 as pb

SOURCES = [Source(WorkerId(f"decode-{number}"), Epoch(number)) for number in range(2)]
PREFILL = Source(WorkerId("prefill-0"), Epoch(9))

sources = st.sampled_from(SOURCES)
flavours = st.integers(0, 1)
"""Which side of a near-tie a computation falls on."""
ages = st.sampled_from([0, 0, 0, 1, 2])
"""Placements back from the current one."""
whos = st.sampled_from([0, 0, 0, 1, 2, 3])
"""Authors back from the newest one."""
rarely = st.sampled_from([False, False, False, False, True])


class Vocabulary:
    """Token ids that know what they were computed from."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}
        self.histories: list[tuple[int, ...]] = []

    def token(self, flavour: int, history: list[int]) -> int:
        """Return the token that follows a history."""
        key = (flavour, tuple(history))
        if key not in self._ids:
            self._ids[key] = len(self.histories)
            self.histories.append(key[1])
        return self._ids[key]


@dataclass
class Author:
    """A decode worker that computes one placement: all that it has generated, shown tokens first."""

    flavour: int
    tokens: list[int]
    is_done: bool = False


@dataclass
class Placement:
    """One placement as the workers see it. `ends_by` is the first word about its end that the gateway has heard."""

    number: int
    shown: list[int]
    authors: dict[Source, Author] = field(default_factory=dict)
    acceptor: Source | None = None
    target: Source | None = None
    ends_by: type[Ending] | None = None

    def end(self, kind: type[Ending]) -> None:
        self.ends_by = self.ends_by or kind


class StreamMachine(RuleBasedStateMachine):
    """`read` is what the client has got; `is_ended`: the request was ended by an error."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.placements: list[Placement] = []
        self.shown: list[int] = []
        self.read: list[int] = []
        self._open()

    @precondition(lambda self: self.stream.is_over or self.is_ended)
    @rule()
    def next_request(self) -> None:
        self._open()

    @rule(placed_at=st.none() | sources)
    @precondition(lambda self: not self.is_ended and self.placements[-1].ends_by is PlacementLost)
    def place_again(self, placed_at: Source | None) -> None:
        self._begin(placed_at)

    @rule(age=ages, source=sources, flavour=flavours)
    def accept(self, age: int, source: Source, flavour: int) -> None:
        placement = self._placement(age)
        placement.authors.setdefault(source, Author(flavour, list(placement.shown)))
        if self._is_current(placement) and placement.ends_by is None:
            placement.acceptor = placement.acceptor or source
        taken = self.stream.take(source, self._event(placement, accepted=pb.Accepted()))
        assert taken == self._is_heard(placement, source)

    @rule(who=whos, offset=st.sampled_from([-2, -1, 0, 0, 0, 1]), count=st.integers(1, 3))
    def frame(self, who: int, offset: int, count: int) -> None:
        """Send tokens that were sent already, the next ones, or ones further on."""
        found = self._author(who)
        if found is None:
            return
        placement, source, author = found
        first = max(len(placement.shown), len(self.shown) + offset)
        while not author.is_done and len(author.tokens) < first + count:
            author.tokens.append(self.vocabulary.token(author.flavour, author.tokens))
        ids = author.tokens[first : first + count]
        if ids:
            num_known = min(first + len(ids), len(self.shown))
            is_refused = first > len(self.shown) or author.tokens[:num_known] != self.shown[:num_known]
            tokens = pb.Tokens(index=first, ids=ids, chain=chain_of(author.tokens[:first]))
            self._hear(source, placement, PlacementLost if is_refused else None, tokens=tokens)

    @rule(age=ages, flavour=flavours)
    def early_copy(self, age: int, flavour: int) -> None:
        """Some try to prefill this placement has its first token."""
        placement = self._placement(age)
        self._send_early(placement, placement.shown, self.vocabulary.token(flavour, placement.shown))

    @rule(flavour=flavours, other=flavours)
    def early_copy_of_other_tokens(self, flavour: int, other: int) -> None:
        """A prefill worker has computed other tokens than were shown, as many."""
        history = list(self.shown)
        if history:
            history[-1] = self.vocabulary.token(other, history[:-1])
        self._send_early(self._placement(0), history, self.vocabulary.token(flavour, history))

    @rule(who=whos, num_unsent=st.integers(0, 1))
    def finish(self, who: int, num_unsent: int) -> None:
        """End the answer where the author is; its last frames may have been lost."""
        found = self._author(who)
        if found is None or found[2].is_done:
            return
        placement, source, author = found
        for _ in range(num_unsent):
            author.tokens.append(self.vocabulary.token(author.flavour, author.tokens))
        author.is_done = True
        finished = pb.Finished(reason="length", num_generated=len(author.tokens))
        is_whole = len(author.tokens) == len(self.shown)
        self._hear(source, placement, EndOfChoice if is_whole else PlacementLost, finished=finished)

    @rule(who=whos, is_retryable=st.booleans())
    def fail(self, who: int, is_retryable: bool) -> None:
        found = self._author(who)
        if found is None:
            return
        placement, source, author = found
        author.is_done = True
        failed = pb.Failed(message="it is", code="bad", is_retryable=is_retryable)
        self._hear(source, placement, PlacementLost if is_retryable else PlacementFailed, failed=failed)

    @rule(source=st.sampled_from([*SOURCES, PREFILL]))
    def lose(self, source: Source) -> None:
        placement = self._placement(0)
        if source == (placement.acceptor or placement.target):
            placement.end(PlacementLost)
        self.stream.lose(source, PlacementLost(LossReason.LOST, "gone"))

    @rule(is_due=rarely)
    def give_up(self, is_due: bool) -> None:
        if not is_due:
            return
        self._placement(0).end(PlacementLost)
        self.stream.give_up("nobody wants it")

    @rule(is_due=rarely)
    def end_request(self, is_due: bool) -> None:
        """Its time is over, or its failure budget is spent."""
        if not is_due:
            return
        self.is_ended |= self._placement(0).ends_by is not EndOfChoice
        self.stream.end(WorkerLost("the request has failed too often"))

    @rule()
    def take_next(self) -> None:
        """Read as the dispatcher does."""
        item = self._next()
        if isinstance(item, TokenDelta):
            assert item.index == len(self.read)
            self.read += item.token_ids
            return
        assert self.read == self.stream.shown, "it ends before it has told everything"
        if self.is_ended:
            assert isinstance(item, WorkerLost)
            return
        assert (item and type(item)) == self._placement(0).ends_by
        match item:
            case EndOfChoice():
                assert item.num_generated == len(self.read)
                self.stream.is_over = True
            case PlacementFailed():
                self.stream.is_over = True

    @invariant()
    def is_one_sequence(self) -> None:
        shown = self.stream.shown
        assert shown[: len(self.shown)] == self.shown, "what was shown has changed"
        for index, token in enumerate(shown):
            assert self.vocabulary.histories[token] == tuple(shown[:index]), f"token {index} continues other tokens"
        self.shown = list(shown)

    def teardown(self) -> None:
        self.loop.close()

    def _open(self) -> None:
        sampling = SamplingParams(seed=1, max_tokens=10_000)
        self.stream = Stream(GenerateRequest(RequestId("r"), ModelName("m"), [1], sampling), max_failures=10_000)
        self.vocabulary = Vocabulary()
        self.placements = []
        self.shown = []
        self.read = []
        self.is_ended = False
        self._begin(SOURCES[0])

    def _begin(self, target: Source | None) -> None:
        self.stream.begin_placement()
        self.stream.target = target
        self.placements.append(Placement(len(self.placements) + 1, list(self.stream.shown), target=target))
        assert self.stream.placement == len(self.placements)

    def _placement(self, age: int) -> Placement:
        return self.placements[max(0, len(self.placements) - 1 - age)]

    def _author(self, who: int) -> tuple[Placement, Source, Author] | None:
        authors = [
            (placement, source, author) for placement in self.placements for source, author in placement.authors.items()
        ]
        return authors[-1 - who] if who < len(authors) else None

    def _is_current(self, placement: Placement) -> bool:
        return placement is self.placements[-1] and not self.stream.is_over and not self.is_ended

    def _is_heard(self, placement: Placement, source: Source) -> bool:
        return self._is_current(placement) and placement.acceptor == source

    def _hear(
        self,
        source: Source,
        placement: Placement,
        ends_by: type[Ending] | None,
        *,
        tokens: pb.Tokens | None = None,
        finished: pb.Finished | None = None,
        failed: pb.Failed | None = None,
    ) -> None:
        """Send an event that only the worker of the current placement may send, and which ends it by `ends_by`."""
        is_heard = self._is_heard(placement, source)
        if is_heard and ends_by is not None:
            placement.end(ends_by)
        event = self._event(placement, tokens=tokens, finished=finished, failed=failed)
        before = list(self.stream.shown)
        assert self.stream.take(source, event) == is_heard
        assert is_heard or self.stream.shown == before

    def _send_early(self, placement: Placement, history: list[int], token: int) -> None:
        early = pb.Tokens(index=len(history), ids=[token], chain=chain_of(history), is_early=True)
        assert self.stream.take(PREFILL, self._event(placement, tokens=early)) == self._is_current(placement)

    def _event(
        self,
        placement: Placement,
        *,
        accepted: pb.Accepted | None = None,
        tokens: pb.Tokens | None = None,
        finished: pb.Finished | None = None,
        failed: pb.Failed | None = None,
    ) -> pb.FeedEvent:
        return pb.FeedEvent(
            request="r",
            placement=placement.number,
            accepted=accepted,
            tokens=tokens,
            finished=finished,
            failed=failed,
        )

    def _next(self) -> StreamItem | WorkerLost | None:
        """Return what the stream has now or raises, None if its reader would have to wait."""
        return self.loop.run_until_complete(self._look())

    async def _look(self) -> StreamItem | WorkerLost | None:
        reading = asyncio.create_task(self.stream.next())
        await asyncio.sleep(0)
        try:
            if reading.done():
                return reading.result()
        except WorkerLost as error:
            return error
        finally:
            reading.cancel()
        return None


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=4 * settings().max_examples)  # they are short
