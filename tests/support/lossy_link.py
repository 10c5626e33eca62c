"""A link between two parts of one process that loses, delays and repeats calls, as dice of the test decide."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

Handler = Callable[[Any], Awaitable[Any]]


@dataclass
class Link:
    """Carries calls. `loss` is the chance that a message is lost, `refusal` that a call fails at once, `repeats` that
    it arrives twice; `delay_s` is how late a message comes at most."""

    dice: random.Random
    loss: float = 0.0
    refusal: float = 0.0
    delay_s: float = 0.01
    repeats: float = 0.0
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    async def call(self, handler: Handler, request: Any, timeout: float) -> Any:
        """Return the answer, or raise as gRPC does; the request may arrive although its answer does not."""
        if self.dice.random() < self.refusal:
            raise _failure(grpc.StatusCode.UNAVAILABLE)
        answering = [self._spawn(self._deliver(handler, request))]
        if self.dice.random() < self.repeats:
            answering.append(self._spawn(self._deliver(handler, request)))
        try:
            async with asyncio.timeout(timeout):
                answer = await asyncio.shield(answering[0])
        except TimeoutError:
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        return answer

    async def _deliver(self, handler: Handler, request: Any) -> Any:
        await self._travel()
        answer = await handler(request)
        await self._travel()
        return answer

    async def _travel(self) -> None:
        if self.dice.random() < self.loss:
            await asyncio.Event().wait()
        await asyncio.sleep(self.dice.uniform(0, self.delay_s))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        return task


def _failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
