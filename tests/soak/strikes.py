"""Faults as they happen to a cluster, and the wait until everything is ready again."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import assert_never

from tests.soak.ledger import Ledger
from tests.soak.schedule import ENDS_A_LIFE, Fault, Kind
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_messages import GO
from tests.support.fault_process import FaultProcess
from tests.support.fault_rules import Delayed, Duplicated, Matcher, Message, Reordered, Rule

LEAVE_S = 90.0
"""A process that is asked to leave drains for 30 s at most; this machine may be slow."""

END_S = 10.0
READY_S = 120.0
TOUCHED = 0.3
"""Share of the messages of a link that are late or come twice."""

NUM_REORDERED = 6
LONGEST_DELAY_S = 1.0


class Strikes:
    """Lets faults happen; writes what they do, and what does not recover, into the ledger."""

    def __init__(self, cluster: FaultCluster, ledger: Ledger) -> None:
        self._cluster = cluster
        self._ledger = ledger

    async def volley(self, faults: tuple[Fault, ...]) -> None:
        """Let one or two faults happen; return when everything is ready again."""
        noted = [
            self._ledger.disturb(fault.kind, fault.target, ends_life=fault.kind in ENDS_A_LIFE) for fault in faults
        ]
        offset_s = 0.0
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                offset_s += fault.pause_s
                group.create_task(self._later(offset_s, fault))
        await self._all_ready()
        for disturbance in noted:
            disturbance.over = time.monotonic()

    async def mend(self) -> None:
        """End every fault of the links, and start what has ended by itself: that is a problem."""
        await self._cluster.heal()
        await self._all_ready()

    async def _later(self, pause_s: float, fault: Fault) -> None:
        await asyncio.sleep(pause_s)  # how long the cluster is left in peace
        process = self._cluster.processes[fault.target]
        if not process.is_running:
            return  # it has ended by itself, which is noted when all is to be ready
        match fault.kind:
            case Kind.KILL | Kind.EMPTY | Kind.TERMINATE:
                await self._end(fault)
            case Kind.FREEZE:
                process.freeze()
                await asyncio.sleep(fault.duration_s)  # the fault itself
                process.thaw()
            case Kind.CUT:
                for link in self._cluster.redis_links.values():
                    link.cut()
            case Kind.BLACK_HOLE:
                await self._cluster.partition.isolate(fault.target)
                await asyncio.sleep(fault.duration_s)  # the fault itself
                await self._cluster.partition.heal()
            case Kind.HOLD_PAGES:
                link = self._cluster.page_link(fault.target)
                link.hold()
                await asyncio.sleep(fault.duration_s)  # the fault itself
                link.heal()
            case Kind.DELAY | Kind.DUPLICATE | Kind.REORDER:
                async with self._touched(fault):
                    await asyncio.sleep(fault.duration_s)  # the fault itself
            case _:
                assert_never(fault.kind)

    async def _end(self, fault: Fault) -> None:
        """End a process and let it come back at the same address."""
        process = self._cluster.processes[fault.target]
        if fault.kind is Kind.TERMINATE:
            process.terminate()
            await self._leave(process)
        else:
            process.kill()
            await process.ended(END_S)
        await asyncio.sleep(fault.duration_s)  # how long it is away
        await self._cluster.restart(fault.target)

    async def _leave(self, process: FaultProcess) -> None:
        try:
            code = await process.ended(LEAVE_S)
        except AssertionError as error:
            self._ledger.wrong("does not leave", str(error))
            await process.end()
        else:
            if code:
                self._ledger.wrong("bad exit", f"{process.name} left with {code}\n{process.tail()}")

    @asynccontextmanager
    async def _touched(self, fault: Fault) -> AsyncIterator[None]:
        """Touch messages of a link meanwhile."""
        switch = _Switch(fault)
        self._cluster.rules.add(*switch.rules())
        try:
            yield
        finally:
            switch.is_on = False

    async def _all_ready(self) -> None:
        for name, process in self._cluster.processes.items():
            if not process.is_running:
                code = await process.ended(END_S)
                self._ledger.wrong("ended by itself", f"{name}: exit code {code}\n{process.tail()}")
                await self._cluster.restart(name)
        try:
            await self._cluster.until_ready(READY_S)
        except AssertionError as error:
            self._ledger.wrong("not ready", str(error).splitlines()[0])  # what follows are ends of logs


class _Switch:
    """Which messages of a link a fault touches while it is on."""

    def __init__(self, fault: Fault) -> None:
        self.is_on = True
        self._fault = fault
        self._random = Random(fault.seed)

    def rules(self) -> list[Rule]:
        """Return the fault as rules."""
        if self._fault.kind is Kind.DUPLICATE:
            return [Duplicated(self._some())]
        if self._fault.kind is Kind.DELAY:
            return [Delayed(self._some(), delay_s=self._random.uniform(0.05, LONGEST_DELAY_S))]
        return [
            Reordered(self._some("Announce"), next_one=self._is_overtaking, reply=GO, patience_s=2.0)
            for _ in range(NUM_REORDERED)
        ]

    def _some(self, method: str | None = None) -> Matcher:
        def matches(message: Message) -> bool:
            is_ours = self.is_on and self._is_at_target(message) and method in (None, message.method)
            return is_ours and self._random.random() < TOUCHED

        return matches

    def _is_overtaking(self, message: Message) -> bool:
        """Any later word to the same worker overtakes an announcement: another one, or the commit."""
        return message.link == self._fault.target and message.method in ("Announce", "Commit")

    def _is_at_target(self, message: Message) -> bool:
        return message.link == self._fault.target
