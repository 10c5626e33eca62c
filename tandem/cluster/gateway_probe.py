"""Asks a gateway whether it could serve a request now."""

import asyncio

import aiohttp

PROBE_TIMEOUT_S = 2.0
PROBE_INTERVAL_S = 0.1


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether `/health/ready` answers 200."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with session.get(f"{url}/health/ready", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def wait_until_ready(session: aiohttp.ClientSession, url: str) -> None:
    """Return when the gateway is ready."""
    while not await is_ready(session, url):  # noqa: ASYNC110 - the state of another process has no event
        await asyncio.sleep(PROBE_INTERVAL_S)
