"""Sends the planned requests and takes the time."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from common.errors import TandemError
from tandem.bench.outcome import Outcome
from tandem.bench.settings import BenchServeSettings
from tandem.bench.workload import PlannedRequest
from tandem.client.gateway_client import GatewayClient

PATH = "/v1/completions"


class LoadClient:
    """Runs requests against one gateway; `on_done` is called after each one."""

    def __init__(
        self, client: GatewayClient, settings: BenchServeSettings, model: str, on_done: Callable[[Outcome], None]
    ) -> None:
        self._client = client
        self._settings = settings
        self._model = model
        self._on_done = on_done

    async def run(self, requests: Sequence[PlannedRequest]) -> list[Outcome]:
        """Return the outcome of every request, in their order."""
        settings = self._settings
        limit = settings.concurrency or (1 if settings.rate is None else len(requests))
        gate = asyncio.Semaphore(limit)
        start_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._request(request, start_s, gate)) for request in requests]
        return [task.result() for task in tasks]

    async def _request(self, request: PlannedRequest, start_s: float, gate: asyncio.Semaphore) -> Outcome:
        is_open_loop = self._settings.rate is not None
        if is_open_loop:
            await asyncio.sleep(start_s + request.arrival_s - time.perf_counter())
        async with gate:
            # In an open loop the wait for a free seat is part of what the client suffers.
            outcome = await self._measure(request, start_s + request.arrival_s if is_open_loop else time.perf_counter())
        self._on_done(outcome)
        return outcome

    async def _measure(self, request: PlannedRequest, arrived_s: float) -> Outcome:
        token_times_s: list[float] = []
        usage: dict[str, Any] = {}
        error = None
        try:
            async with aclosing(self._client.stream(PATH, self._body(request))) as chunks:
                async for chunk in chunks:
                    if _has_text(chunk):
                        token_times_s.append(time.perf_counter())
                    usage = chunk.get("usage") or usage
        except TandemError as failure:
            error = str(failure)
        return Outcome(
            arrived_s,
            time.perf_counter(),
            tuple(token_times_s),
            int(usage.get("prompt_tokens", len(request.prompt))),
            int(usage.get("completion_tokens", len(token_times_s))),
            error,
        )

    def _body(self, request: PlannedRequest) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": self._settings.output_tokens,
            "temperature": self._settings.temperature,
            "ignore_eos": self._settings.ignore_eos,
            "stream_options": {"include_usage": True},
        }


def _has_text(chunk: dict[str, Any]) -> bool:
    with contextlib.suppress(LookupError, TypeError):
        return bool(chunk["choices"][0]["text"])
    return False
