"""What a stranger, an impostor or a broken peer can do to the listeners of page transfer: nothing."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from common.errors import IncompatiblePeer, PeerUnreachable
from common.messages.ids import Epoch
from common.messages.registry import TransferEndpoint
from common.transfer import handshake, page_frames, tcp_peer
from common.transfer.connection import Connection
from common.transfer.host import host_id
from common.transfer.listener import Listener
from common.transfer.pool_header import PoolHeader
from common.transfer.pool_memory import PoolMemory
from common.transfer.puller import Puller
from common.transfer.tcp_source import TcpSource
from tests.support.hostile_bytes import finish, hostile_payloads
from tests.support.page_network import DEADLINE_S, SECRET, Network
from tests.support.pools import copies, fill, is_copied, make_pool

HUGE_CLAIM = handshake._CLAIM.pack(b"tandemP1", bytes(32), 1, 10**12, bytes(32))


@pytest.fixture(params=["shm", "tcp"])
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Network]:
    """The transports that have a listener."""
    network = Network(request.param, tmp_path)
    async with asyncio.timeout(60), network.stack:
        yield network


class TestAuthentication:
    async def test_another_secret_is_refused(self, wire: Network, caplog: pytest.LogCaptureFixture) -> None:
        theirs, ours = make_pool(), make_pool()
        endpoint = await wire.source(theirs, secret="another").start()
        with pytest.raises(IncompatiblePeer, match="secret"):
            await wire.puller(ours).connect(endpoint, theirs.header.epoch)
        assert SECRET not in caplog.text

    async def test_a_source_that_does_not_know_the_secret_is_refused(self, wire: Network) -> None:
        theirs, ours = make_pool(), make_pool()
        endpoint = await wire.source(theirs).start()
        listener = await Impostor.replace(wire, endpoint)
        with pytest.raises(IncompatiblePeer, match="secret"):
            await wire.puller(ours).connect(listener.endpoint, theirs.header.epoch)
        await listener.close()


class Impostor:
    """Answers every puller with a welcome that proves nothing."""

    def __init__(self, server: asyncio.Server, endpoint: TransferEndpoint) -> None:
        self._server = server
        self.endpoint = endpoint

    @classmethod
    async def replace(cls, wire: Network, endpoint: TransferEndpoint) -> "Impostor":
        if wire.kind == "tcp":
            server = await asyncio.start_server(cls._serve, "127.0.0.1", 0)
            return cls(server, TransferEndpoint("127.0.0.1", server.sockets[0].getsockname()[1]))
        path = str(wire.directory / "impostor.sock")
        return cls(await asyncio.start_unix_server(cls._serve, path), TransferEndpoint("", 0, host_id(), path))

    @staticmethod
    async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake._CHALLENGE.pack(b"tandemP1", bytes(32)))
        await reader.readexactly(handshake._CLAIM.size)
        writer.write(handshake._ANSWER.pack(0, 16, bytes(32)))
        writer.close()

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


class TestHostilePeers:
    async def test_b131_garbage_ends_its_own_connection_only(
        self, wire: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        theirs, ours = make_pool(), make_pool()
        fill(theirs, [1], generation=1)
        endpoint = await wire.source(theirs).start()
        marker = tmp_path / "marker"
        for payload in [*hostile_payloads(marker).values(), HUGE_CLAIM]:
            await asyncio.to_thread(send_and_wait_for_end, endpoint, payload)
        await wire.puller(ours).pull(endpoint, theirs.header.epoch, copies([(1, 1)], 1))
        assert is_copied(ours, 1, 1, 1)
        assert not marker.exists()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    @pytest.mark.parametrize("num_blocks", [10**12, 2**63, 2**64 - 1])
    async def test_b131_a_pool_of_an_impossible_size_costs_no_memory(self, tmp_path: Path, num_blocks: int) -> None:
        """Its source knows the secret, and hands out a sealed file: only its numbers are wrong."""
        theirs, ours = make_pool(), make_pool()
        claimed = PoolHeader(theirs.header.epoch, theirs.header.page_bytes, num_blocks)

        async def serve(connection: Connection) -> None:
            secret = handshake.Secret.of(SECRET)
            await handshake.welcome(connection, secret, handshake.Transport.SHARED_MEMORY, claimed)
            with theirs.read_only_file() as fd:
                connection.send_descriptor(fd)
            await connection.receive(1)

        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(tmp_path / "huge.sock"))
        sock.listen()
        listener = Listener(sock, serve)
        before_bytes = psutil.Process().memory_info().vms
        puller = Puller(ours, SECRET, host_id(), "shm")
        with pytest.raises(IncompatiblePeer, match="another size"):
            await puller.connect(TransferEndpoint("", 0, host_id(), str(tmp_path / "huge.sock")), claimed.epoch)
        assert psutil.Process().memory_info().vms - before_bytes < 1 << 30
        await puller.close()
        await listener.close()
        network = Network("shm", tmp_path)
        async with network.stack:  # and an honest one is understood as ever
            fill(theirs, [1], generation=1)
            endpoint = await network.source(theirs).start()
            await network.puller(ours).pull(endpoint, theirs.header.epoch, copies([(1, 1)], 1))
            assert is_copied(ours, 1, 1, 1)

    @pytest.mark.parametrize(
        "reply",
        [
            struct.pack("<4sBI", b"tpRp", page_frames.Status.PAGES, 2**32 - 1),
            struct.pack("<4sBI", b"tpRp", 9, 1),
            struct.pack("<4sBI", b"XXXX", page_frames.Status.PAGES, 1),
            b"\x91" * 100_000,
        ],
        ids=["too many pages", "unknown status", "wrong magic", "deep arrays"],
    )
    async def test_b131_a_reply_of_impossible_numbers_ends_the_pull(self, reply: bytes) -> None:
        theirs, ours = make_pool(), make_pool()
        before = bytes(ours.pages)

        async def serve(connection: Connection) -> None:
            claimed = PoolHeader(theirs.header.epoch, theirs.header.page_bytes, 2**64 - 1)
            await handshake.welcome(connection, handshake.Secret.of(SECRET), handshake.Transport.TCP, claimed)
            await connection.receive(page_frames.REQUEST_BYTES + page_frames.PAGE_BYTES)
            await connection.send(reply)
            await connection.receive(1)

        sock = socket.create_server(("127.0.0.1", 0))
        listener = Listener(sock, serve)
        puller = Puller(ours, SECRET, host_id(), "tcp")
        endpoint = TransferEndpoint("127.0.0.1", sock.getsockname()[1])
        with pytest.raises(PeerUnreachable, match="page reply"):
            await puller.pull(endpoint, theirs.header.epoch, copies([(0, 0)], 0))
        assert bytes(ours.pages) == before
        await puller.close()
        await listener.close()

    async def test_b131_a_silent_peer_is_dropped(self, wire: Network, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("shm_source", "tcp_source"):
            monkeypatch.setattr(f"common.transfer.{module}.HANDSHAKE_TIMEOUT_S", 0.1)
        endpoint = await wire.source(make_pool()).start()
        await asyncio.to_thread(send_and_wait_for_end, endpoint, b"tan", half_close=False)

    async def test_a_source_that_never_answers_is_unreachable(
        self, wire: Network, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("shm_peer", "tcp_peer"):
            monkeypatch.setattr(f"common.transfer.{module}.HANDSHAKE_TIMEOUT_S", 0.1)
        family = socket.AF_INET if wire.kind == "tcp" else socket.AF_UNIX
        with socket.socket(family) as silent:
            silent.bind(("127.0.0.1", 0) if wire.kind == "tcp" else str(wire.directory / "silent.sock"))
            silent.listen()
            name = silent.getsockname()
            endpoint = TransferEndpoint(*name) if wire.kind == "tcp" else TransferEndpoint("", 0, host_id(), name)
            with pytest.raises(PeerUnreachable):
                await wire.puller(make_pool()).connect(endpoint, Epoch(1))

    async def test_b131_garbage_after_the_handshake_ends_the_connection(self) -> None:
        theirs = make_pool()
        source = TcpSource(theirs, SECRET, "127.0.0.1")
        endpoint = await source.start()
        requests = [
            struct.pack("<4sIQ", b"tpRq", 2**31, theirs.header.epoch),
            struct.pack("<4sIQ", b"tpRq", 0, theirs.header.epoch),
            struct.pack("<4sIQ", b"tpRq", 1, theirs.header.epoch ^ 1),
            struct.pack("<4sIQ", b"XXXX", 1, theirs.header.epoch),
            struct.pack("<4sIQ", b"tpRq", 1, theirs.header.epoch) + struct.pack("<IQ", 2**32 - 1, 0),
        ]
        for request in requests:
            sock = await authenticated(endpoint, theirs)
            await asyncio.to_thread(finish, sock, request, half_close=False)
        await source.close()

    async def test_too_many_connections_are_refused(self, wire: Network) -> None:
        endpoint = await wire.source(make_pool()).start()
        held = [connect_raw(endpoint) for _ in range(128)]
        for sock in held:  # the challenge shows that the connection was accepted
            assert await asyncio.to_thread(sock.recv, 1)
        await asyncio.to_thread(send_and_wait_for_end, endpoint, b"", half_close=False)
        for sock in held:
            sock.close()


class TestStallingSource:
    """A source that is authentic, accepts a request and then falls silent (a frozen process)."""

    @pytest.fixture
    async def stalling(self) -> AsyncIterator[tuple[TransferEndpoint, PoolMemory, asyncio.Event]]:
        pool = make_pool()
        is_asked = asyncio.Event()

        async def serve(connection: Connection) -> None:
            await handshake.welcome(connection, handshake.Secret.of(SECRET), handshake.Transport.TCP, pool.header)
            await connection.receive(page_frames.REQUEST_BYTES + page_frames.PAGE_BYTES)
            is_asked.set()
            await asyncio.Event().wait()

        sock = socket.create_server(("127.0.0.1", 0))
        endpoint = TransferEndpoint("127.0.0.1", sock.getsockname()[1])
        listener = Listener(sock, serve)
        yield endpoint, pool, is_asked
        await listener.close()

    async def test_a_pull_from_it_is_cancelled_at_once(
        self, stalling: tuple[TransferEndpoint, PoolMemory, asyncio.Event]
    ) -> None:
        endpoint, pool, is_asked = stalling
        puller = Puller(make_pool(), SECRET, host_id(), "tcp")
        pull = asyncio.create_task(puller.pull(endpoint, pool.header.epoch, copies([(0, 0)], 0)))
        await is_asked.wait()
        pull.cancel()
        async with asyncio.timeout(tcp_peer._STALL_S / 2):
            with pytest.raises(asyncio.CancelledError):
                await pull
        await puller.close()

    async def test_closing_the_puller_ends_its_pulls(
        self, stalling: tuple[TransferEndpoint, PoolMemory, asyncio.Event]
    ) -> None:
        endpoint, pool, is_asked = stalling
        puller = Puller(make_pool(), SECRET, host_id(), "tcp")
        pull = asyncio.create_task(puller.pull(endpoint, pool.header.epoch, copies([(0, 0)], 0)))
        await is_asked.wait()
        async with asyncio.timeout(tcp_peer._STALL_S / 2):
            await puller.close()
            with pytest.raises(PeerUnreachable):
                await pull

    async def test_a_pull_from_it_ends_by_itself(
        self, stalling: tuple[TransferEndpoint, PoolMemory, asyncio.Event], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tcp_peer, "_STALL_S", 0.2)
        endpoint, pool, _ = stalling
        puller = Puller(make_pool(), SECRET, host_id(), "tcp")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(PeerUnreachable, match="sent nothing"):
                await puller.pull(endpoint, pool.header.epoch, copies([(0, 0)], 0))
        await puller.close()


def connect_raw(endpoint: TransferEndpoint) -> socket.socket:
    if endpoint.socket is None:
        sock = socket.create_connection((endpoint.host, endpoint.port))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(endpoint.socket)
    sock.settimeout(DEADLINE_S)
    return sock


def send_and_wait_for_end(endpoint: TransferEndpoint, payload: bytes, *, half_close: bool = True) -> None:
    finish(connect_raw(endpoint), payload, half_close=half_close)


async def authenticated(endpoint: TransferEndpoint, pool: PoolMemory) -> socket.socket:
    """Return a raw connection behind the handshake."""
    connection = Connection(connect_raw(endpoint), "source")
    secret = handshake.Secret.of(SECRET)
    await handshake.introduce(connection, secret, handshake.Transport.TCP, pool.header.epoch, pool.header.page_bytes)
    connection.sock.settimeout(DEADLINE_S)
    return connection.sock
