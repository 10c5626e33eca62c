"""Who asks how often for what: arrivals at random (Poisson) that wait for nobody, or as many at once as are served."""

import asyncio
import random
import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.overload.client import Ask, Client, Shot

_LETTERS = string.ascii_lowercase + " "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose prompts have so many letters. `rate`: its requests per second in an open loop."""

    name: str
    key: str
    num_letters: int
    num_answer_tokens: int
    rate: float = 0.0

    def ask(self, chance: random.Random) -> Ask:
        """Return a request whose prompt nobody has sent before."""
        prompt = "".join(chance.choices(_LETTERS, k=self.num_letters))
        return Ask(self.name, self.key, prompt, self.num_answer_tokens)


async def fire_one_by_one(client: Client, tenant: Tenant, count: int, chance: random.Random) -> list[Shot]:
    """Return what became of so many requests, one after the other."""
    return [await client.fire(tenant.ask(chance)) for _ in range(count)]


async def fire_closed(
    client: Client, tenants: Sequence[Tenant], at_once: int, seconds: float, chance: random.Random
) -> list[Shot]:
    """Return what became of the requests of so many clients per tenant that ask again and again."""
    shots: list[Shot] = []
    end_s = time.perf_counter() + seconds

    async def ask_again(tenant: Tenant) -> None:
        while time.perf_counter() < end_s:
            shot = await client.fire(tenant.ask(chance))
            shots.append(shot)
            if not shot.is_served:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(ask_again(tenant) for tenant in tenants for _ in range(at_once)))
    return shots


async def fire_open(client: Client, tenants: Sequence[Tenant], seconds: float, chance: random.Random) -> list[Shot]:
    """Return what became of all requests that arrive in so many seconds; the last answers are waited for."""
    begin_s = time.perf_counter()
    shots: list[asyncio.Task[Shot]] = []
    for arrival_s, tenant in sorted(_arrivals(tenants, seconds, chance), key=lambda pair: pair[0]):
        ask = tenant.ask(chance)
        delay_s = begin_s + arrival_s - time.perf_counter()
        await asyncio.sleep(max(0.0, delay_s))
        shots.append(asyncio.create_task(client.fire(ask)))
    return list(await asyncio.gather(*shots))


def _arrivals(tenants: Sequence[Tenant], seconds: float, chance: random.Random) -> Iterator[tuple[float, Tenant]]:
    for tenant in tenants:
        now_s = chance.expovariate(tenant.rate)
        while now_s < seconds:
            yield now_s, tenant
            now_s += chance.expovariate(tenant.rate)
