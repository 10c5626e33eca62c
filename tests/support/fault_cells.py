"""Cells of the fault matrix, one or several at once: requests at their stages, a fault, what must hold then."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.support.exchange import Answer, Exchange, Refusal
from tests.support.fault_cluster import FaultCluster
from tests.support.fault_stages import PROBE, Stage, Stager, Undisturbed, Victim
from tests.support.fault_table import Measured, Table

MAX_STAGINGS = 4
PROBE_PAUSE_S = 0.1
LONGEST_REFUSAL_S = 4.0
TOKENS = "tokens"
GONE = "let go"
"""The client has left; what was held for it is free."""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What clients may get besides the undisturbed tokens. `may_break`: the connection, with its gateway."""

    may_fail: bool = False
    may_break: bool = False

    def judge(self, result: Answer | Refusal, expected: Answer, ask: Exchange) -> str:
        """Return the outcome in a word; fail if it is none of the allowed ones."""
        if isinstance(result, Answer):
            assert result == expected, f"other tokens than undisturbed:\n{result}\n{expected}"
            return TOKENS
        assert expected.begins_with(ask.told), f"wrong tokens before an error:\n{ask}\n{expected}"
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
    _measured: list[Measured] = field(default_factory=list)

    async def stage(self, stages: Sequence[Stage]) -> None:
        """Bring bystanders and victims to where the fault is to find them; again if it took longer than calls wait."""
        await self.cluster.until_ready()
        for _ in range(MAX_STAGINGS):
            await self.cluster.until_idle()
            self._stager = Stager(self.cluster, self.plain, self.victims_at)
            self._others = await self._stager.bystanders(self.others_at)
            if await self._stager.bring_all(stages):
                return
            await self._give_up()
        raise AssertionError("this machine is too slow to hold a request at each stage at the same time")

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
            result = await ask.over()  # a gateway that is not there yet breaks the connection
            late_s = time.monotonic() - self.struck_at
            if isinstance(result, Answer):
                assert result == self.plain.answers[PROBE]
                assert late_s < self.bound_s, f"a new request succeeded only after {late_s:.1f} s"
                return late_s
            assert late_s < self.bound_s, f"no new request succeeds after {late_s:.1f} s: {result}"
            await asyncio.sleep(PROBE_PAUSE_S)  # as a client that tries again

    async def refused_at_once(self) -> None:
        """While Redis is away new requests are refused without delay, and told to come again.

        In the first seconds a gateway may still place by what it knows: it finds out by asking.
        """
        ask = self.cluster.ask(self.plain.bodies[PROBE], self.others_at)
        result = await ask.over(LONGEST_REFUSAL_S)
        assert isinstance(result, Refusal), result
        assert result.status == 503, result
        assert result.retry_after is not None, result

    async def settle(self, others: Verdicts | None = None) -> None:
        """Wait for every client and judge what it got. `others`: what bystanders may get, tokens if None."""
        for name, ask in self._others.items():
            (others or Verdicts()).judge(await ask.over(), self.plain.answers[name], ask)
        for victim in self.victims:
            result = await victim.ask.over()
            outcome = self.verdicts.judge(result, self.plain.answers[victim.stage], victim.ask)
            silence_s = victim.ask.silence_after(self.struck_at)
            self._measured.append(Measured(self.fault, self.role, victim.stage, silence_s, outcome))

    async def let_go(self) -> None:
        """Wait until nothing is held for victims that have left, and bystanders have their tokens; note the cells."""
        for name, ask in self._others.items():
            Verdicts().judge(await ask.over(), self.plain.answers[name], ask)
        await self.cluster.until_idle()
        recovery_s = time.monotonic() - self.struck_at
        self.table.cells += [Measured(self.fault, self.role, victim.stage, recovery_s, GONE) for victim in self.victims]
        assert recovery_s < self.bound_s, f"held for {recovery_s:.1f} s"

    def record(self, probe_s: float) -> None:
        """Note the cells; fail if a client waited for too long."""
        self.table.cells += [replace(cell, probe_s=probe_s) for cell in self._measured]
        late = [cell for cell in self._measured if cell.recovery_s is not None and cell.recovery_s > self.bound_s]
        assert not late, f"later than {self.bound_s} s: {late}"

    async def at_rest(self) -> None:
        """End every fault of the links; all is ready and idle again (I2)."""
        await self.cluster.heal()
        await self.cluster.until_ready()
        await self.cluster.until_idle()

    async def _give_up(self) -> None:
        self._stager.release()
        await self.cluster.heal()
        for ask in (*self._others.values(), *(victim.ask for victim in self.victims)):
            await ask.over()


def holder_of(cluster: FaultCluster, victims: Sequence[Victim], role: str) -> str:
    """Return the one process of a role that has all the victims."""
    seen: Mapping[str, str] = getattr(cluster.rules.sightings, role)
    holders = {seen[victim.request] for victim in victims}
    assert len(holders) == 1, f"not with one {role} worker: {holders}"
    return holders.pop()
