"""A puller that does not know the cluster's secret learns nothing from a page source, however much else it knows."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.messages.registry import TransferEndpoint
from common.transfer import handshake
from common.transfer.handshake import Secret, Transport
from common.transfer.pool_memory import PoolMemory
from tests.support.page_network import DEADLINE_S, SECRET, Network
from tests.support.pools import make_pool

WELCOME, WRONG_SECRET = bytes([handshake._Verdict.WELCOME]), bytes([handshake._Verdict.WRONG_SECRET])


@pytest.fixture(params=["shm", "tcp"])
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    network = Network(request.param, tmp_path)
    async with network.stack:
        yield network


def answered(endpoint: TransferEndpoint, theirs: PoolMemory, secret: str) -> bytes:
    """Return what a source says to a puller that claims the right epoch and page size."""
    family, address = (socket.AF_UNIX, endpoint.socket) if endpoint.socket else (socket.AF_INET, None)
    with socket.socket(family) as sock:
        sock.settimeout(DEADLINE_S)
        sock.connect(address or (endpoint.host, endpoint.port))
        _, nonce = handshake._CHALLENGE.unpack(sock.recv(handshake._CHALLENGE.size, socket.MSG_WAITALL))
        transport = Transport.SHARED_MEMORY if endpoint.socket else Transport.TCP
        header, own_nonce = theirs.header, bytes(32)
        claim = handshake._CLAIM.pack(b"tandemP1", own_nonce, header.epoch, header.page_bytes, bytes(32))[40:56]
        proof = Secret.of(secret).proof(b"puller", transport, nonce, own_nonce, claim)
        sock.sendall(b"tandemP1" + own_nonce + claim + proof)
        return sock.recv(handshake._ANSWER.size, socket.MSG_WAITALL)


async def test_a_puller_without_the_secret_gets_no_answer(wire: Network) -> None:
    theirs = make_pool()
    endpoint = await wire.source(theirs).start()
    refused = await asyncio.to_thread(answered, endpoint, theirs, "another secret")
    assert refused == WRONG_SECRET + bytes(handshake._ANSWER.size - 1)
    assert (await asyncio.to_thread(answered, endpoint, theirs, SECRET)).startswith(WELCOME)
