"""Asks a gateway whether it could serve a request now."""

import aiohttp

PROBE_TIMEOUT_S = 2.0


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether `/health/ready` answers 200."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with session.get(f"{url}/health/ready", timeout=timeout) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
