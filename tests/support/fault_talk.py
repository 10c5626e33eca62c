"""Cells of the fault matrix about messages: one request for each stage, and one message of each that goes wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.exchange import Exchange
from tests.support.fault_cells import Verdicts
from tests.support.fault_client import asking
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_rules import Faulty
from tests.support.fault_stages import REACH_S, IsMine, Stage, Undisturbed, about, hold_at
from tests.support.fault_table import Measured, Table
from tests.support.polling import until


@dataclass(frozen=True)
class Touched:
    """A request of which one message is touched; `release` opens its gate, if it waits for that."""

    stage: Stage
    ask: Exchange
    rule: Faulty | None
    release: Callable[[], None] | None


@dataclass(eq=False)
class Talk:
    """Requests that run side by side. `bound_s`: the longest that any client may wait for its next text."""

    cluster: FaultCluster
    plain: Undisturbed
    table: Table
    fault: str
    role: str
    bound_s: float
    _touched: list[Touched] = field(default_factory=list)

    def touch(self, stage: Stage, fault: Callable[[IsMine], Faulty], *, is_held: bool = False) -> None:
        """Prepare the request of a stage. With `is_held` it stays at that stage until its message has come."""
        ask = asking(self.cluster.url(), self.plain.bodies[stage])
        is_mine = about(self.cluster, ask)
        release = hold_at(self.cluster, stage, is_mine)[1] if is_held else None
        rule = fault(is_mine)
        self.cluster.rules.add(rule)
        self._touched.append(Touched(stage, ask, rule, release))

    def ask(self, stage: Stage) -> None:
        """Prepare the request of a stage of which no single message is touched."""
        self._touched.append(Touched(stage, asking(self.cluster.url(), self.plain.bodies[stage]), None, None))

    async def run(self) -> None:
        """Start all, judge all, and see that everything is idle afterwards (I2)."""
        started = time.monotonic()
        for each in self._touched:
            each.ask.start()
        for each in self._touched:
            await self._let_go(each)
        measured = [await self._judged(each, started) for each in self._touched]
        self.table.cells += measured
        late = [cell for cell in measured if cell.recovery_s is not None and cell.recovery_s > self.bound_s]
        assert not late, f"later than {self.bound_s} s: {late}"
        await self.cluster.heal()
        await self.cluster.until_ready()
        await self.cluster.until_idle()

    async def _let_go(self, each: Touched) -> None:
        if each.release is not None and each.rule is not None:
            rule = each.rule
            await until(lambda: rule.num_acted, f"the message of {each.stage}: {each.ask}", REACH_S)
            each.release()

    async def _judged(self, each: Touched, started: float) -> Measured:
        outcome = Verdicts().judge(await each.ask.over(), self.plain.answers[each.stage], each.ask)
        assert each.rule is None or each.rule.num_acted, f"no message of {each.stage} was touched"
        return Measured(self.fault, self.role, each.stage, each.ask.silence_after(started), outcome)
