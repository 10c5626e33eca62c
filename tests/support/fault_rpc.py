"""A gRPC proxy in front of one worker: every call and every frame of a feed passes through the rules of the harness.

It knows bytes and method names; the messages are decoded only so that rules can tell them apart. A call goes on to the
worker even if its caller has given it up meanwhile: what is on its way arrives.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message as Proto

from common.rpc.options import COMMON_OPTIONS
from proto import worker_pb2 as pb
from tests.support.fault_partition import Partition
from tests.support.fault_rules import Message, Rules

logger = logging.getLogger(__name__)

FEED = "Feed"
REQUESTS: Mapping[str, Callable[[], Proto]] = {
    "Feed": pb.FeedRequest,
    "Cancel": pb.CancelRequest,
    "Prompt": pb.PromptRequest,
    "Bind": pb.BindRequest,
    "Announce": pb.AnnounceRequest,
    "Commit": pb.CommitRequest,
    "Renew": pb.RenewRequest,
    "Release": pb.ReleaseRequest,
}
LONGEST_CALL_S = 60.0
"""A call to a process that is frozen ends at last."""

_CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    *COMMON_OPTIONS,
)
_Context = grpc.aio.ServicerContext[bytes, bytes]


class RpcLink(grpc.GenericRpcHandler):
    """The way to worker `owner`, which listens on 127.0.0.1:`port`; the proxy has the same port on another `host`."""

    def __init__(self, owner: str, host: str, port: int, rules: Rules, partition: Partition) -> None:
        self._owner = owner
        self._address = f"{host}:{port}"
        self._rules = rules
        self._partition = partition
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_CHANNEL_OPTIONS)
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self._address)
        self._under_way: set[asyncio.Task[Any]] = set()
        self.refuses_feeds = False
        """Whether gateways are kept from connecting, so that they place nothing there."""
        self.num_feeds = 0
        """Gateways that are connected."""

    async def start(self) -> None:
        """Listen."""
        await self._server.start()

    async def close(self) -> None:
        """Stop; what is held is dropped."""
        await self._server.stop(None)
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return the forwarder of a call, whatever its method."""
        method = handler_call_details.method
        metadata = tuple(
            (key, value) for key, value in handler_call_details.invocation_metadata or () if key == "tandem-secret"
        )
        if method.rpartition("/")[2] == FEED:
            return grpc.unary_stream_rpc_method_handler(partial(self._feed, method, metadata))
        return grpc.unary_unary_rpc_method_handler(partial(self._call, method, metadata))

    async def _call(
        self, method: str, metadata: Sequence[tuple[str, str | bytes]], request: bytes, context: _Context
    ) -> bytes:
        name = method.rpartition("/")[2]
        message = Message(self._owner, name, _parsed(name, request))
        port = _port_of(context)

        async def forward() -> bytes:
            await self._partition.passage(self._owner, port)
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
            reply = await call(request, metadata=metadata, timeout=LONGEST_CALL_S)
            await self._partition.passage(self._owner, port)
            return reply

        delivery = self._spawn(self._rules.pass_on(message, forward))
        try:
            return await asyncio.shield(delivery)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
            raise AssertionError("abort returned") from error

    async def _feed(
        self, method: str, metadata: Sequence[tuple[str, str | bytes]], request: bytes, context: _Context
    ) -> None:
        port = _port_of(context)
        await self._partition.passage(self._owner, port)
        if self.refuses_feeds:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "kept away")
        open_feed: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method)
        call = open_feed(request, metadata=metadata)
        self.num_feeds += 1
        try:
            async for raw in call:
                if self.refuses_feeds:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "kept away")
                await self._pass_frame(raw, port, context)
        except grpc.aio.AioRpcError as error:
            await self._partition.passage(self._owner, port)
            await context.abort(error.code(), error.details() or "")
        finally:
            self.num_feeds -= 1
            self._spawn(self._hang_up(call, port))

    async def _pass_frame(self, raw: bytes, port: int, context: _Context) -> None:
        message = Message(self._owner, FEED, pb.FeedFrame.FromString(raw))
        await self._partition.passage(self._owner, port)

        async def forward() -> bytes:
            await context.write(raw)
            return b""

        await self._rules.pass_on(message, forward)

    async def _hang_up(self, call: Any, port: int) -> None:
        """Tell the worker that its gateway has hung up, when that can be heard."""
        await self._partition.passage(self._owner, port)
        call.cancel()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._settle)
        return task

    def _settle(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.info("a call to %s failed: %s", self._owner, task.exception())


def _parsed(method: str, data: bytes) -> Proto:
    message = REQUESTS[method]()
    message.ParseFromString(data)
    return message


def _port_of(context: _Context) -> int:
    return int(context.peer().rpartition(":")[2])
