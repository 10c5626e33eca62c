"""The gRPC service that decode workers offer to prefill workers: bind, announce, commit.

Every handler is idempotent and answers at once; an outdated binding is `stale`, a cancelled request `cancelled`.
"""

import grpc

from common.errors import BrokerUnavailable, MalformedRecord
from common.messages.ids import EntryId, Epoch, Fingerprint, PlacementNumber, RequestId, WorkerId
from common.messages.objections import objection_to_ids
from common.messages.registry import WorkerRecord
from common.rpc.logprobs import logprobs_of
from common.runtime.peers import Peers
from common.scheduling.emission import FailureCode
from common.scheduling.sequence import PlacementKey
from decode_worker.first_token import FirstToken
from decode_worker.receiver import Receiver
from decode_worker.reception import Attempt, Commit, Reception, TryLoss
from decode_worker.retirements import Retirements
from decode_worker.witness import Witness
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import DecodeServicer


class HandoverServicer(DecodeServicer):
    """Answers prefill workers from the receiver's state."""

    def __init__(
        self,
        receiver: Receiver,
        retirements: Retirements,
        peers: Peers,
        fingerprint: Fingerprint,
        lease_s: float,
        witness: Witness,
        vocab_size: int,
    ) -> None:
        self._receiver = receiver
        self._retirements = retirements
        self._peers = peers
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._witness = witness
        self._vocab_size = vocab_size

    async def Bind(  # noqa: N802 - named by the service
        self, request: pb.BindRequest, context: "grpc.aio.ServicerContext[pb.BindRequest, pb.BindReply]"
    ) -> pb.BindReply:
        """Bind a claimer to the current try; the reply tells the ids and the blocks that are wanted."""
        if request.fingerprint != self._fingerprint:
            reason = "the fingerprints differ: model, cache geometry or protocol version are not the same"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        source = await self._source(WorkerId(request.worker), Epoch(request.epoch))
        self._peers.hear(Epoch(request.epoch))
        reception, attempt = self._current(request.binding)
        entry = EntryId(request.entry) if request.HasField("entry") else None
        if entry is not None:  # as its author we must delete it, also one that we do not know
            if attempt is None:
                self._retirements.add(entry)
            else:
                attempt.entries.add(entry)
        if reception is None or attempt is None or source is None or not attempt.bind(source):
            return pb.BindReply(verdict=self._refusal(reception))
        return pb.BindReply(
            verdict=pb.VERDICT_GO,
            ids=reception.ids,
            first_block=reception.first_block,
            num_blocks=len(reception.block_ids),
            lease_s=self._lease_s,
        )

    async def Announce(  # noqa: N802 - named by the service
        self, request: pb.AnnounceRequest, context: "grpc.aio.ServicerContext[pb.AnnounceRequest, pb.VerdictReply]"
    ) -> pb.VerdictReply:
        """Start to pull finished pages."""
        reception, attempt = self._current(request.binding)
        if reception is None or attempt is None or not attempt.is_bound_to(request.epoch):
            return pb.VerdictReply(verdict=self._refusal(reception))
        self._receiver.pull(reception, attempt, list(request.pages))
        return pb.VerdictReply(verdict=pb.VERDICT_GO)

    async def Commit(  # noqa: N802 - named by the service
        self, request: pb.CommitRequest, context: "grpc.aio.ServicerContext[pb.CommitRequest, pb.VerdictReply]"
    ) -> pb.VerdictReply:
        """Take the first token, or the news that the prefill failed."""
        reception, attempt = self._current(request.binding)
        if reception is None or attempt is None or not attempt.is_bound_to(request.epoch):
            return pb.VerdictReply(verdict=self._refusal(reception))
        if request.failure:
            attempt.lose(_loss_of(request.failure), f"the prefill failed: {request.failure}")
        else:
            _take_commit(request, reception, attempt, self._vocab_size)
        return pb.VerdictReply(verdict=pb.VERDICT_GO)

    async def _source(self, worker: WorkerId, epoch: Epoch) -> WorkerRecord | None:
        record = self._peers.find(worker, epoch)
        if record is None:  # it may have registered a moment ago
            try:
                await self._peers.refresh()
            except BrokerUnavailable:
                return None
            record = self._peers.find(worker, epoch)
        return record

    def _current(self, binding: pb.Binding) -> tuple[Reception | None, Attempt | None]:
        key = PlacementKey(RequestId(binding.request), PlacementNumber(binding.placement))
        reception = self._receiver.find(key)
        return reception, None if reception is None else reception.current(binding)

    def _refusal(self, reception: Reception | None) -> "pb.Verdict.ValueType":
        self._witness.ignored()
        return pb.VERDICT_CANCELLED if reception is None else pb.VERDICT_STALE


def _take_commit(request: pb.CommitRequest, reception: Reception, attempt: Attempt, vocab_size: int) -> None:
    """Note what a commit brings; one that lacks what was asked for, or names tokens that do not exist, loses the
    try.
    """
    try:
        first = _first_token(request)
    except MalformedRecord as error:
        attempt.lose(TryLoss.REFUSED, str(error))
        return
    objection = reception.lacks(first) or objection_to_ids(_ids_of(request), vocab_size)
    if objection:
        attempt.lose(TryLoss.REFUSED, f"its commit: {objection}")
    else:
        attempt.take_commit(Commit(first, request.traceparent), is_last=first.token in reception.stop_ids)


def _first_token(request: pb.CommitRequest) -> FirstToken:
    return FirstToken(
        request.token,
        request.num_cached_tokens,
        logprobs_of(request.logprobs) if request.HasField("logprobs") else None,
        tuple(map(logprobs_of, request.prompt_logprobs)),
    )


def _ids_of(request: pb.CommitRequest) -> list[int]:
    """Return every token id that a commit names."""
    ids = [request.token, *request.logprobs.top_ids]
    for logprobs in request.prompt_logprobs:
        ids.extend(logprobs.top_ids)
    return ids


def _loss_of(failure: str) -> TryLoss:
    """A prompt that does not fit there says nothing against the request."""
    match failure:
        case FailureCode.INVALID_LOGITS:
            return TryLoss.FAILED
        case FailureCode.GRAMMAR_VIOLATED:
            return TryLoss.VIOLATED
        case _:
            return TryLoss.REFUSED
