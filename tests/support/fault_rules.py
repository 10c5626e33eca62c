"""What may happen to a message between two processes: it waits, comes twice, late, out of order, or not at all.

A rule is asked for every message of every link; the first that matches decides. `forward` delivers the message and
returns the reply (nothing for a frame of a feed).
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message as Proto

from proto import worker_pb2 as pb

Forward = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Message:
    """A call, or a frame of a feed, on its way through the link of a worker."""

    link: str
    method: str
    proto: Proto

    @property
    def is_frame(self) -> bool:
        """Whether nobody waits for a reply."""
        return isinstance(self.proto, pb.FeedFrame)

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that it is about."""
        match self.proto:
            case pb.FeedFrame():
                return tuple(event.request for event in self.proto.events)
            case pb.BindRequest() | pb.AnnounceRequest() | pb.CommitRequest():
                return (self.proto.binding.request,)
            case pb.RenewRequest() | pb.ReleaseRequest():
                return tuple(binding.request for binding in self.proto.bindings)
            case pb.CancelRequest() | pb.PromptRequest():
                return (self.proto.request,)
            case _:
                return ()


Matcher = Callable[[Message], bool]


class Rule(Protocol):
    """One fault."""

    def matches(self, message: Message) -> bool:
        """Whether the rule decides about this message."""

    async def act(self, message: Message, forward: Forward) -> bytes:
        """Deliver it in the rule's way; return the reply for the caller."""


class Sightings:
    """Which workers a request has been seen at, the latest first in mind."""

    def __init__(self) -> None:
        self.decode: dict[str, str] = {}
        """Worker that has accepted the request last."""
        self.prefill: dict[str, str] = {}
        """Worker that has asked last to prefill it."""
        self.num_placements: dict[str, int] = defaultdict(int)
        """How often it was accepted."""

    def note(self, message: Message) -> None:
        """Look at a message that is about to pass."""
        match message.proto:
            case pb.BindRequest():
                self.prefill[message.proto.binding.request] = message.proto.worker
            case pb.FeedFrame():
                for event in message.proto.events:
                    if event.HasField("accepted"):
                        self.decode[event.request] = message.link
                        self.num_placements[event.request] += 1


class Rules:
    """The faults that are set up now. `sightings` tells who holds what, by what has passed."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self.sightings = Sightings()

    def add(self, *rules: Rule) -> None:
        """Set up faults."""
        self._rules.extend(rules)

    def clear(self) -> None:
        """End every fault; what is held stays with its gate."""
        self._rules.clear()

    async def pass_on(self, message: Message, forward: Forward) -> bytes:
        """Deliver a message as the first matching rule wants."""
        self.sightings.note(message)
        rule = next((rule for rule in self._rules if rule.matches(message)), None)
        return await (forward() if rule is None else rule.act(message, forward))


class Nth:
    """Matches the `number`-th message that `matcher` matches, once, or it and all later ones (`and_later`)."""

    def __init__(self, matcher: Matcher, number: int = 1, *, and_later: bool = False) -> None:
        self._matcher = matcher
        self._number = number
        self._and_later = and_later
        self._count = 0

    def __call__(self, message: Message) -> bool:
        if not self._matcher(message):
            return False
        self._count += 1
        return self._count == self._number or (self._and_later and self._count > self._number)


@dataclass(eq=False)
class Gate:
    """Holds messages until it is opened. `seen` is set once one waits."""

    matcher: Matcher

    def __post_init__(self) -> None:
        self.seen = asyncio.Event()
        self._opened = asyncio.Event()
        self.held: list[Message] = []

    def matches(self, message: Message) -> bool:
        return not self._opened.is_set() and self.matcher(message)

    def open(self) -> None:
        """Let everything pass."""
        self._opened.set()

    async def act(self, message: Message, forward: Forward) -> bytes:
        self.held.append(message)
        self.seen.set()
        await self._opened.wait()
        return await forward()


@dataclass(eq=False)
class Before:
    """Calls `do` when a message comes and lets it pass."""

    matcher: Matcher
    do: Callable[[Message], None]

    def matches(self, message: Message) -> bool:
        return self.matcher(message)

    async def act(self, message: Message, forward: Forward) -> bytes:
        self.do(message)
        return await forward()


@dataclass(eq=False)
class After:
    """Sets `passed` when a message has been answered."""

    matcher: Matcher

    def __post_init__(self) -> None:
        self.passed = asyncio.Event()

    def matches(self, message: Message) -> bool:
        return self.matcher(message)

    async def act(self, message: Message, forward: Forward) -> bytes:
        reply = await forward()
        self.passed.set()
        return reply


@dataclass(eq=False)
class Faulty(ABC):
    """A fault of the network that touches messages; `num_acted` counts them."""

    matcher: Matcher
    num_acted: int = 0

    def matches(self, message: Message) -> bool:
        return self.matcher(message)

    @abstractmethod
    async def act(self, message: Message, forward: Forward) -> bytes:
        """Deliver it in the rule's way."""


@dataclass(eq=False)
class Duplicated(Faulty):
    """Delivered twice at once, and once more `late_s` later."""

    late_s: float = 0.5

    async def act(self, message: Message, forward: Forward) -> bytes:
        self.num_acted += 1
        reply = await forward()
        await forward()
        if not message.is_frame:  # a frame that is not in its place would be another frame of the stream
            self._again = asyncio.create_task(self._repeat(forward))
        return reply

    async def _repeat(self, forward: Forward) -> None:
        await asyncio.sleep(self.late_s)  # the fault itself, not a wait for something
        await forward()


@dataclass(eq=False)
class Delayed(Faulty):
    """Delivered `delay_s` later."""

    delay_s: float = 0.7

    async def act(self, message: Message, forward: Forward) -> bytes:
        self.num_acted += 1
        await asyncio.sleep(self.delay_s)  # the fault itself, not a wait for something
        return await forward()


@dataclass(eq=False)
class Lost(Faulty):
    """Never delivered; the caller waits for its own deadline."""

    async def act(self, message: Message, forward: Forward) -> bytes:
        self.num_acted += 1
        if not message.is_frame:
            await asyncio.Event().wait()
        return b""


@dataclass(eq=False)
class Reordered(Faulty):
    """Delivered behind the next message that `next_one` matches, or after `patience_s` if none comes.

    The caller of the first would wait for its answer before it sent the second: it gets `reply` at once. With None it
    waits.
    """

    next_one: Matcher = lambda _: False
    reply: bytes | None = b""
    patience_s: float = 8.0

    def __post_init__(self) -> None:
        self._overtaken = asyncio.Event()
        self._is_waiting = False
        self._late: set[asyncio.Task[bytes]] = set()

    def matches(self, message: Message) -> bool:
        return self._is_next(message) or (not self.num_acted and self.matcher(message))

    async def act(self, message: Message, forward: Forward) -> bytes:
        if self._is_next(message):
            self._is_waiting = False
            reply = await forward()
            self._overtaken.set()
            await asyncio.gather(*self._late, return_exceptions=True)  # its receiver may refuse what comes too late
            return reply
        self.num_acted += 1
        self._is_waiting = True
        delivery = asyncio.create_task(self._deliver(forward))
        self._late.add(delivery)
        return await delivery if self.reply is None else self.reply

    def _is_next(self, message: Message) -> bool:
        return self._is_waiting and self.next_one(message)

    async def _deliver(self, forward: Forward) -> bytes:
        try:
            async with asyncio.timeout(self.patience_s):
                await self._overtaken.wait()
        except TimeoutError:
            self._is_waiting = False
        return await forward()
