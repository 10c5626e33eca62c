"""The gRPC services of a prefill worker: leases for decode workers, and its desk for gateways."""

from collections.abc import Callable

import grpc

from common.messages.ids import ChoiceIndex, Epoch, PlacementNumber, RequestId
from prefill_worker.holdings import Holdings, key_of
from proto import worker_pb2 as pb
from proto.worker_pb2_grpc import PrefillServicer


class LeaseServicer(PrefillServicer):
    """Renews and ends bindings; tells with every renewal whether the engine is stalled."""

    def __init__(self, epoch: Epoch, holdings: Holdings, is_stalled: Callable[[], bool]) -> None:
        self._epoch = epoch
        self._holdings = holdings
        self._is_stalled = is_stalled

    async def Renew(  # noqa: N802 - named by the service
        self, request: pb.RenewRequest, context: "grpc.aio.ServicerContext[pb.RenewRequest, pb.RenewReply]"
    ) -> pb.RenewReply:
        """Extend leases; tell which bindings are not held."""
        unknown = self._holdings.renew(request.bindings)
        return pb.RenewReply(unknown=unknown, epoch=self._epoch, is_stalled=self._is_stalled())

    async def Release(  # noqa: N802 - named by the service
        self, request: pb.ReleaseRequest, context: "grpc.aio.ServicerContext[pb.ReleaseRequest, pb.ReleaseReply]"
    ) -> pb.ReleaseReply:
        """End bindings."""
        for binding in request.bindings:
            self._holdings.end(key_of(binding))
        return pb.ReleaseReply()


class PrefillDesk:
    """Gateways only listen to prefill workers; what they cancel, they cancel at the decode worker."""

    def cancel(self, request: RequestId, placement: PlacementNumber) -> None:
        """Nothing: the decode worker tells us."""

    def cancel_choice(self, request: RequestId, placement: PlacementNumber, choice: ChoiceIndex) -> None:
        """Nothing: the decode worker tells us."""

    def supply_prompt(self, request: RequestId, placement: PlacementNumber, ids: bytes) -> bool:
        """Return False: prompts come with the binding."""
        return False
