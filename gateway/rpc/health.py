"""`grpc.health.v1`: whether a request could be served now, as `/health/ready` says it. Open to everybody.

`Check` looks at the moment; `Watch` looks `LOOK_S` after `LOOK_S`, as readiness has no event.
"""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from common.errors import Overloaded, RouteNotFound
from gateway.rpc.calls import SERVICE
from gateway.service import Service

LOOK_S = 0.25
MAX_WATCHES = 64
"""Whoever watches shows no key, and takes a call of everybody's."""

NAMES = ("", SERVICE.full_name)

SERVING: int = pb.HealthCheckResponse.SERVING
NOT_SERVING: int = pb.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = pb.HealthCheckResponse.SERVICE_UNKNOWN


class Health(HealthServicer):  # type: ignore[misc]  # its package has no types
    """Behind `Root`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._leaves = asyncio.Event()
        self._num_watches = 0

    def leave(self) -> None:
        """End every watch: the listener closes."""
        self._leaves.set()

    async def Check(  # noqa: N802 - named by the service
        self, request: pb.HealthCheckRequest, context: object
    ) -> pb.HealthCheckResponse:
        """Answer for the moment."""
        status = self._status_of(request.service)
        if status == SERVICE_UNKNOWN:
            raise RouteNotFound("There is no such service.", code="unknown_service")
        return pb.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - named by the service
        self, request: pb.HealthListRequest, context: object
    ) -> pb.HealthListResponse:
        """Answer for all services."""
        return pb.HealthListResponse(
            statuses={name: pb.HealthCheckResponse(status=self._status_of(name)) for name in NAMES}
        )

    async def Watch(  # noqa: N802 - named by the service
        self,
        request: pb.HealthCheckRequest,
        context: "grpc.aio.ServicerContext[pb.HealthCheckRequest, pb.HealthCheckResponse]",
    ) -> None:
        """Tell every change until the client or this process leaves."""
        if self._num_watches >= MAX_WATCHES:
            raise Overloaded("Too many watch the health of this server.")
        self._num_watches += 1
        try:
            told = None
            while not self._leaves.is_set():
                status = self._status_of(request.service)
                if status != told:
                    await context.write(pb.HealthCheckResponse(status=status))
                    told = status
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._leaves.wait()
        finally:
            self._num_watches -= 1

    def _status_of(self, name: str) -> int:
        if name not in NAMES:
            return SERVICE_UNKNOWN
        is_serving = not self._service.admission.is_draining and self._service.engine.readiness().is_ready
        return SERVING if is_serving else NOT_SERVING
