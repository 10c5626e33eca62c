"""Cells of the fault matrix, one or several at once: requests at their stages, a fault, what must hold then."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.fault_client import Answer, Ask, Refusal
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_stages import PROBE, Stage, Stager, Undisturbed, Victim
from tests.support.fault_table import Measured, Table

PROBE_PAUSE_S = 0.1
TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What clients may get besides the undisturbed tokens. `may_break`: the connection, with its gateway."""

    may_fail: bool = False
    may_break: bool = False

    def judge(self, result: Answer | Refusal, expected: Answer, ask: Ask) -> str:
        """Return the outcome in a word; fail if it is none of the allowed ones."""
        if isinstance(result, Answer):
            assert result == expected, f"other tokens than undisturbed:\n{result}\n{expected}"
            return TOKENS
        assert expected.text.startswith(ask.text), f"wrong tokens before an error:\n{ask.text}\n{expected.text}"
        if not result.is_clean:
            assert self.may_break, f"the connection broke: {result} {ask}"
            return "connection broken"
        assert self.may_fail, f"an error where tokens were due: {result} {ask}"
        return f"{result.status} {result.code}"


@dataclass(eq=False)
class Scene:
    """What a fault finds, and what happens to it. `bound_s`: by when victims and new requests must go on."""

    cluster: FaultCluster
    plain: Undisturbed
    table: Table
    fault: str
    role: str
    bound_s: float
    verdicts: Verdicts = field(default_factory=Verdicts)
    victims_at: str = "gateway-0"
    others_at: str = "gateway-0"

    async def stage(self, stages: Sequence[Stage]) -> None:
        """Bring bystanders and victims to where the fault is to find them."""
        await self.cluster.until_ready()
        await self.cluster.until_idle()
        self._stager = Stager(self.cluster, self.plain, self.victims_at)
        self._others = await self._stager.bystanders(self.others_at)
        for stage in Stage:
            if stage in stages:
                await self._stager.bring(stage)

    @property
    def victims(self) -> list[Victim]:
        """Who is held at a stage."""
        return self._stager.victims

    async def strike(self, fault: Callable[[], Awaitable[None] | None]) -> None:
        """Let the fault happen, then let everybody go on."""
        early = [victim.stage for victim in self.victims if victim.ask.is_over]
        assert not early, f"over before the fault: {early}"
        self.struck_at = time.monotonic()
        done = fault()
        if done is not None:
            await done
        self._stager.release()

    async def probe(self) -> float:
        """Ask anew until a new request succeeds; return how long after the fault that was."""
        while True:
            ask = self.cluster.ask(self.plain.bodies[PROBE], self.others_at)
            result = await ask.over()
            late_s = time.monotonic() - self.struck_at
            if isinstance(result, Answer):
                assert result == self.plain.answers[PROBE]
                assert late_s < self.bound_s, f"a new request succeeded only after {late_s:.1f} s"
                return late_s
            assert late_s < self.bound_s, f"no new request succeeds after {late_s:.1f} s: {result}"
            await asyncio.sleep(PROBE_PAUSE_S)  # as a client that tries again

    async def settle(self, probe_s: float | None) -> None:
        """Wait for every client, judge what it got, and note the cells."""
        for name, ask in self._others.items():
            Verdicts().judge(await ask.over(), self.plain.answers[name], ask)
        late: list[str] = []
        for victim in self.victims:
            result = await victim.ask.over()
            outcome = self.verdicts.judge(result, self.plain.answers[victim.stage], victim.ask)
            recovery_s = victim.ask.silence_after(self.struck_at)
            self.table.cells.append(Measured(self.fault, self.role, victim.stage, recovery_s, outcome, probe_s))
            if recovery_s > self.bound_s:
                late.append(f"{victim.stage}: {recovery_s:.1f} s")
        assert not late, f"later than {self.bound_s} s: {late}"

    async def at_rest(self) -> None:
        """End every fault of the links; all is ready and idle again (I2)."""
        await self.cluster.heal()
        await self.cluster.until_ready()
        await self.cluster.until_idle()


def holder_of(cluster: FaultCluster, victims: Sequence[Victim], role: str) -> str:
    """Return the one process of a role that has all the victims."""
    seen: Mapping[str, str] = getattr(cluster.rules.sightings, role)
    holders = {seen[victim.request] for victim in victims}
    assert len(holders) == 1, f"not with one {role} worker: {holders}"
    return holders.pop()
