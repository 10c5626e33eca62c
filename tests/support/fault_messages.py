"""Which message stands for a stage of a request: what each role says there, and what can overtake it."""

from dataclasses import dataclass

from proto import worker_pb2 as pb
from tests.support.fault_rules import Matcher, Message, Nth
from tests.support.fault_stages import CHUNK, IsMine, Stage

GO = pb.VerdictReply(verdict=pb.VERDICT_GO).SerializeToString()


@dataclass(frozen=True)
class Utterance:
    """`matcher` finds the message. Out of order it comes behind what `next_one` finds; its sender, which would wait,
    gets `reply` (None: it waits)."""

    matcher: Matcher
    next_one: Matcher
    reply: bytes | None = b""


def said_by_prefill(stage: Stage, is_mine: IsMine) -> Utterance:
    """Return what a prefill worker says at a stage; while others decode, its early copy of token 1 may still come."""
    match stage:
        case Stage.QUEUED:
            return Utterance(Nth(_calls(is_mine, "Bind")), _calls(is_mine, "Bind"), None)
        case Stage.PREFILLING:
            return Utterance(Nth(_calls(is_mine, "Announce"), CHUNK), _calls(is_mine, "Announce"), GO)
        case Stage.TRANSFERRING:
            return Utterance(Nth(_calls(is_mine, "Announce"), 5), _calls(is_mine, "Announce"), GO)
        case Stage.COMMITTING:
            return Utterance(Nth(_calls(is_mine, "Commit")), _calls(is_mine, "Renew"), GO)
        case Stage.DECODING:
            early = _frames(is_mine, "prefill", "tokens")
            return Utterance(Nth(early), _frames(is_mine, "decode", "tokens"))


def last_pages_behind_commit(is_mine: IsMine, num_announcements: int) -> Utterance:
    """Return the last announcement, to be overtaken by the commit."""
    return Utterance(Nth(_calls(is_mine, "Announce"), num_announcements), _calls(is_mine, "Commit"), GO)


def said_by_decode(stage: Stage, is_mine: IsMine, renewed: bytes) -> Utterance:
    """Return what a decode worker says at a stage. `renewed`: what a prefill worker answers to a renewal."""
    match stage:
        case Stage.QUEUED:
            return Utterance(Nth(_frames(is_mine, "decode", "accepted")), _frames(is_mine, "decode", "tokens"))
        case Stage.PREFILLING | Stage.TRANSFERRING | Stage.COMMITTING:
            return Utterance(Nth(_calls(is_mine, "Renew")), _calls(is_mine, "Release"), renewed)
        case Stage.DECODING:
            tokens = _frames(is_mine, "decode", "tokens")
            return Utterance(Nth(tokens, 3), tokens)


def said_by_gateway(is_mine: IsMine) -> Utterance:
    """Return the cancel of a request whose client has left; that of another request may overtake it."""
    return Utterance(
        Nth(_calls(is_mine, "Cancel")), lambda message: message.method == "Cancel" and not is_mine(message, "Cancel")
    )


def _calls(is_mine: IsMine, method: str) -> Matcher:
    return lambda message: is_mine(message, method)


def _frames(is_mine: IsMine, role: str, kind: str) -> Matcher:
    def matches(message: Message) -> bool:
        if not (message.link.startswith(role) and is_mine(message, "Feed")):
            return False
        frame = message.proto
        assert isinstance(frame, pb.FeedFrame)
        return any(
            event.WhichOneof("event") == kind and is_mine(_alone(message, event), "Feed") for event in frame.events
        )

    return matches


def _alone(message: Message, event: pb.FeedEvent) -> Message:
    return Message(message.link, message.method, pb.FeedFrame(events=[event]))
