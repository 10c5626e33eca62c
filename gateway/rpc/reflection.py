"""Reflection: tells `grpcurl` and others what is served here, and nothing of what the processes say to each other.

Whoever may call may also ask: where keys are needed, reflection needs one too. The package knows the version v1alpha;
v1 has the same messages under another name, and newer clients ask for it first.
"""

from collections.abc import AsyncIterator

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio

from gateway.rpc.calls import SERVICE
from proto.tandem.v1 import generate_pb2

VERSION_1 = "grpc.reflection.v1.ServerReflection"
METHOD = "ServerReflectionInfo"


def reflection_handlers() -> tuple[grpc.GenericRpcHandler, ...]:
    """Return the handlers of both versions."""
    health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    pool = DescriptorPool()
    for described in (generate_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, pb.DESCRIPTOR):
        pool.AddSerializedFile(described.serialized_pb)
    servicer = aio.ReflectionServicer((SERVICE.full_name, health, SERVICE_NAME, VERSION_1), pool)

    async def tell(
        requests: AsyncIterator[pb.ServerReflectionRequest],
        context: "grpc.aio.ServicerContext[pb.ServerReflectionRequest, pb.ServerReflectionResponse]",
    ) -> None:
        async for response in servicer.ServerReflectionInfo(requests, context):
            await context.write(response)

    handler = grpc.stream_stream_rpc_method_handler(
        tell, _request_or_nothing, pb.ServerReflectionResponse.SerializeToString
    )
    return tuple(grpc.method_handlers_generic_handler(name, {METHOD: handler}) for name in (SERVICE_NAME, VERSION_1))


def _request_or_nothing(message: bytes) -> pb.ServerReflectionRequest:
    """Return the request; one that cannot be read asks for nothing, which is answered as an invalid one."""
    try:
        return pb.ServerReflectionRequest.FromString(message)
    except DecodeError:
        return pb.ServerReflectionRequest()
