"""Messages of one call on their way to its client, as fast as it takes them."""

from collections.abc import Sequence

import grpc

from gateway.patience import Patience
from gateway.rpc.events import merged
from proto.tandem.v1 import generate_pb2 as pb


class MessageCarrier:
    """A `Carrier`; raises `ConnectionError` when the client is gone or takes nothing for `write_timeout_s`.

    A write returns when gRPC's flow control has room for more, so that what a slow client has not taken stays small:
    about its window (64 KiB, or what it asks for) and one message.
    """

    def __init__(
        self, context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]", write_timeout_s: float
    ) -> None:
        self._context = context
        self._patience = Patience(write_timeout_s)

    async def carry(self, items: Sequence[pb.GenerateResponse], *, is_last: bool = False) -> None:
        """Write messages; deltas that are ready together go together."""
        for message in merged(items):
            await self._write(message)

    async def reassure(self) -> None:
        """Do nothing: HTTP/2 keeps its connections alive by itself."""

    def close(self) -> None:
        """Stop the timer."""
        self._patience.close()

    async def _write(self, message: pb.GenerateResponse) -> None:
        try:
            with self._patience:
                await self._context.write(message)
        except TimeoutError as error:
            if self._patience.is_over:
                raise ConnectionResetError("the client takes no more messages") from error
            raise
        except grpc.aio.InternalError as error:  # the call is over
            raise ConnectionResetError("the client is gone") from error
