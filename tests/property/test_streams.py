"""A gateway's stream under frames of current and old placements, early copies, repetitions, gaps and divergences, in
any order, of several choices at once: what is shown of a choice is one sequence, each token computed from exactly the
tokens before it and read once with its own logprobs, and it ends once.

Each token of the model names the choice and the tokens that it was computed from. So a continuation that is stitched
together from two authors, from two choices, or from two prefills of a near-tie, shows as a token with another history
than the one before it.

Kills the planted bugs END_ON_FIRST-gateway, IDX_ONLY, NO_CHAIN, NO_CHOICE_ID-gateway, RESTART_ENDED,
early-copy-behind-the-end, early-copy-loses-the-placement, end-behind-the-loss, end-without-tokens, gap-shown,
logprobs-uncounted, lost-by-anybody, read-behind-its-end, repetition-unchecked, second-acceptor, second-ending and
source-ignored.
"""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import WorkerLost
from common.messages.chain import chain_of
from common.messages.ids import ChoiceIndex, Epoch, ModelName, RequestId, WorkerId
from common.messages.logprobs import TokenLogprobs
from common.messages.sampling import SamplingParams
from gateway.engine import EndOfChoice, GenerateRequest, TokenDelta
from gateway.losses import LossReason, PlacementLost
from gateway.streams import Ending, PlacementFailed, Source, Stream, StreamItem
from proto import worker_pb2 as pb
from tests.support.stream_model import Author, Placement, Vocabulary, logprobs_of

SOURCES = [Source(WorkerId(f"decode-{number}"), Epoch(number)) for number in range(2)]
PREFILL = Source(WorkerId("prefill-0"), Epoch(9))

sources = st.sampled_from(SOURCES)
flavours = st.integers(0, 1)
"""Which side of a near-tie a computation falls on."""
ages = st.sampled_from([0, 0, 0, 1, 2])
"""Placements back from the current one."""
whos = st.sampled_from([0, 0, 0, 1, 2, 3])
"""Authors back from the newest one."""
counts = st.sampled_from([1, 1, 1, 1, 2, 2, 3])
"""Of choices: what goes wrong with one is found soonest with one."""
numbers = st.sampled_from([0] * 12 + [1] * 4 + [2] * 2 + [9])
"""Of choices: modulo those that were asked for, except that of the last one there is none."""
rarely = st.sampled_from([False] * 9 + [True])
NO_CHOICE = 9


class StreamMachine(RuleBasedStateMachine):
    """By choice, `shown` is what the gateway has, `read` what the client has got. `ended`: choices of which the gateway
    knows the end; `told`: the client, too; `unwanted`: choices that the client has given up. `is_ended`: the request
    was ended by an error."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.placements: list[Placement] = []

    @initialize(num_choices=counts)
    def first_request(self, num_choices: int) -> None:
        self._open(num_choices)

    @precondition(lambda self: self.stream.is_over or self.is_ended)
    @rule(num_choices=counts)
    def next_request(self, num_choices: int) -> None:
        self._open(num_choices)

    @rule(placed_at=st.none() | sources)
    @precondition(lambda self: self._goes_on() and self.placements[-1].ends_by is PlacementLost)
    def place_again(self, placed_at: Source | None) -> None:
        self._begin(placed_at)

    @rule(age=ages, source=sources, flavour=flavours)
    def accept(self, age: int, source: Source, flavour: int) -> None:
        placement = self._placement(age)
        placement.authors.setdefault(source, Author(flavour, [list(tokens) for tokens in placement.shown]))
        if self._is_current(placement) and placement.ends_by is None and self._goes_on():
            placement.acceptor = placement.acceptor or source
        taken = self.stream.take(source, self._event(placement, accepted=pb.Accepted()))
        assert taken == self._is_heard(placement, source)

    @rule(
        who=whos,
        number=numbers,
        offset=st.sampled_from([-2, -1, 0, 0, 0, 1]),
        count=st.integers(1, 3),
        is_sloppy=rarely,
    )
    def send_frame(self, who: int, number: int, offset: int, count: int, is_sloppy: bool) -> None:
        """An author sends tokens of a choice that the client has already, the next ones, or ones further on; if it is
        sloppy, without the logprobs of the last one."""
        found = self._author(who)
        if found is None:
            return
        placement, source, author = found
        if number == NO_CHOICE:
            nonsense = pb.Tokens(index=0, ids=[1], chain=chain_of([]), choice=NO_CHOICE, logprobs=logprobs_of([1]))
            self._hear(source, placement, PlacementLost, tokens=nonsense)
            return
        choice = number % self.num_choices
        known, own = self.shown[choice], author.tokens[choice]
        first = max(len(placement.shown[choice]), len(known) + offset)
        while choice not in author.done and not author.is_done and len(own) < first + count:
            own.append(self.vocabulary.token(choice, author.flavour, own))
        ids = own[first : first + count]
        if ids:
            num_known = min(first + len(ids), len(known))
            is_refused = first > len(known) or own[:num_known] != known[:num_known] or is_sloppy
            tokens = pb.Tokens(
                index=first,
                ids=ids,
                chain=chain_of(own[:first]),
                choice=choice,
                logprobs=logprobs_of(ids[: len(ids) - is_sloppy]),
            )
            self._hear(
                source, placement, PlacementLost if is_refused and self._is_open(choice) else None, tokens=tokens
            )

    @rule(who=whos, number=numbers, flavour=flavours)
    def tell_another_past(self, who: int, number: int, flavour: int) -> None:
        """An author goes on behind what it takes for the last token of a choice."""
        found, choice = self._author(who), number % self.num_choices
        known = self.shown[choice]
        if found is None or not known:
            return
        placement, source, _ = found
        past = self.vocabulary.token(choice, flavour, known[:-1])
        ids = [past, self.vocabulary.token(choice, flavour, [*known[:-1], past])]
        tokens = pb.Tokens(
            index=len(known) - 1, ids=ids, chain=chain_of(known[:-1]), choice=choice, logprobs=logprobs_of(ids)
        )
        is_refused = past != known[-1] and self._is_open(choice)
        self._hear(source, placement, PlacementLost if is_refused else None, tokens=tokens)

    @rule(age=ages, number=numbers, flavour=flavours, is_sloppy=rarely)
    def early_copy(self, age: int, number: int, flavour: int, is_sloppy: bool) -> None:
        """Some try to prefill this placement has the first token of a choice."""
        placement, choice = self._placement(age), number % self.num_choices
        history = placement.shown[choice]
        token = self.vocabulary.token(choice, flavour, history)
        self._send_early(placement, number, history, token, is_sloppy=is_sloppy)

    @rule(number=numbers, flavour=flavours, other=flavours)
    def early_copy_of_other_tokens(self, number: int, flavour: int, other: int) -> None:
        """A prefill worker has computed other tokens than were shown, as many."""
        choice = number % self.num_choices
        history = list(self.shown[choice])
        if history:
            history[-1] = self.vocabulary.token(choice, other, history[:-1])
        token = self.vocabulary.token(choice, flavour, history)
        self._send_early(self._placement(0), number, history, token)

    @rule(who=whos, number=numbers, num_unsent=st.integers(0, 1))
    def finish(self, who: int, number: int, num_unsent: int) -> None:
        """End a choice where the author is; its last frames may have been lost."""
        found, choice = self._author(who), number % self.num_choices
        if found is None or found[2].is_done or choice in found[2].done:
            return
        placement, source, author = found
        own = author.tokens[choice]
        for _ in range(num_unsent):
            own.append(self.vocabulary.token(choice, author.flavour, own))
        author.done.add(choice)
        ends_by: type[Ending] | None = None
        if self._is_heard(placement, source) and self._is_open(choice) and placement.ends_by is None:
            if len(own) == len(self.shown[choice]):
                self.ended.add(choice)
            else:
                ends_by = PlacementLost
        finished = pb.Finished(reason="length", num_generated=len(own), choice=choice)
        self._hear(source, placement, ends_by, finished=finished)

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
            self._end(placement, PlacementLost)
        self.stream.lose(source, PlacementLost(LossReason.LOST, "gone"))

    @rule(is_due=rarely)
    def give_up(self, is_due: bool) -> None:
        if not is_due:
            return
        self._end(self._placement(0), PlacementLost)
        self.stream.give_up("nobody wants it")

    @rule(is_due=rarely)
    def end_request(self, is_due: bool) -> None:
        """Its time is over, or its failure budget is spent."""
        if not is_due:
            return
        self.is_ended |= self._goes_on()
        self.stream.end(WorkerLost("the request has failed too often"))

    @rule(number=numbers, is_due=rarely)
    def end_choice(self, number: int, is_due: bool) -> None:
        """Its client has met a stop string."""
        choice = ChoiceIndex(number % self.num_choices)
        if not is_due or choice in self.told:
            return
        was_open = self._is_open(choice)
        assert self.stream.end_choice(choice) == was_open
        self.unwanted.add(choice)

    @rule()
    def take_next(self) -> None:
        """Read as the dispatcher does."""
        is_waiting, item = self._next()
        if isinstance(item, TokenDelta | EndOfChoice):
            self._take_news(item)
            return
        wanted = set(range(self.num_choices)) - self.unwanted
        assert all(self.read[choice] == self.shown[choice] for choice in wanted), "it ends before it told everything"
        assert self.ended & wanted == self.told - self.unwanted, "it ends before it told every end"
        if self.is_ended:
            assert isinstance(item, WorkerLost)
        elif not self._goes_on():
            assert (is_waiting, item) == (False, None)
            self.stream.is_over = True
        else:
            assert (item and type(item)) == self._placement(0).ends_by
            assert is_waiting == (item is None)
            self.stream.is_over |= isinstance(item, PlacementFailed)

    @invariant()
    def is_one_sequence_per_choice(self) -> None:
        for choice, known in enumerate(self.shown):
            shown = self.stream.choices.all[choice].shown
            assert shown[: len(known)] == known, "what was shown has changed"
            for index, token in enumerate(shown):
                history = (choice, tuple(shown[:index]))
                assert self.vocabulary.histories[token] == history, f"token {index} continues other tokens"
            self.shown[choice] = list(shown)

    def teardown(self) -> None:
        self.loop.close()

    def _open(self, num_choices: int) -> None:
        sampling = SamplingParams(seed=1, max_tokens=10_000, num_logprobs=1)
        request = GenerateRequest(RequestId("r"), ModelName("m"), [1], sampling, num_choices=num_choices)
        self.num_choices = num_choices
        self.stream = Stream(request, max_failures=10_000)
        self.vocabulary = Vocabulary()
        self.placements = []
        self.shown: list[list[int]] = [[] for _ in range(num_choices)]
        self.read: list[list[int]] = [[] for _ in range(num_choices)]
        self.ended: set[int] = set()
        self.told: set[int] = set()
        self.unwanted: set[int] = set()
        self.is_ended = False
        self._begin(SOURCES[0])

    def _begin(self, target: Source | None) -> None:
        to_continue = [open_choice.choice for open_choice in self.stream.choices.to_continue]
        assert to_continue == [choice for choice in range(self.num_choices) if self._is_open(choice)]
        self.stream.begin_placement()
        self.stream.target = target
        shown = [list(choice.shown) if choice.index in to_continue else [] for choice in self.stream.choices.all]
        self.placements.append(Placement(len(self.placements) + 1, shown, target=target))
        assert self.stream.placement == len(self.placements)

    def _take_news(self, item: TokenDelta | EndOfChoice) -> None:
        choice = item.choice
        assert choice not in self.unwanted
        assert choice not in self.told, "something came behind the end"
        if isinstance(item, TokenDelta):
            assert item.index == len(self.read[choice])
            assert item.logprobs == tuple(TokenLogprobs(-token, ((token, -token),)) for token in item.token_ids)
            self.read[choice] += item.token_ids
        else:
            assert choice in self.ended
            assert item.num_generated == len(self.read[choice]) == len(self.shown[choice])
            self.told.add(choice)

    def _is_open(self, choice: int) -> bool:
        return choice not in self.ended | self.unwanted

    def _goes_on(self) -> bool:
        return not self.is_ended and any(self._is_open(choice) for choice in range(self.num_choices))

    def _end(self, placement: Placement, kind: type[Ending]) -> None:
        if self._goes_on() or self.is_ended:
            placement.ends_by = placement.ends_by or kind

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
            self._end(placement, ends_by)
        event = self._event(placement, tokens=tokens, finished=finished, failed=failed)
        before = [list(choice.shown) for choice in self.stream.choices.all]
        assert self.stream.take(source, event) == is_heard
        assert is_heard or [choice.shown for choice in self.stream.choices.all] == before

    def _send_early(
        self, placement: Placement, number: int, history: list[int], token: int, *, is_sloppy: bool = False
    ) -> None:
        choice = number if number == NO_CHOICE else number % self.num_choices
        logprobs = [] if is_sloppy else logprobs_of([token])
        early = pb.Tokens(
            index=len(history), ids=[token], chain=chain_of(history), is_early=True, choice=choice, logprobs=logprobs
        )
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

    def _next(self) -> tuple[bool, StreamItem | WorkerLost | None]:
        """Return whether a reader would have to wait, and what the stream has now or raises."""
        return self.loop.run_until_complete(self._look())

    async def _look(self) -> tuple[bool, StreamItem | WorkerLost | None]:
        reading = asyncio.create_task(self.stream.next())
        await asyncio.sleep(0)
        try:
            if reading.done():
                return False, reading.result()
        except WorkerLost as error:
            return False, error
        finally:
            reading.cancel()
        return True, None


TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=8 * settings().max_examples)  # they are short
