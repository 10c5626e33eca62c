"""TLS for HTTP and gRPC alike: who is let in, how streams run, and how certificates are renewed."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from gateway import certificates as certificates_module
from gateway.certificates import Certificates
from proto.tandem.v1 import generate_pb2 as pb
from tests.support.certificates import Authority, TlsFolder
from tests.support.polling import until
from tests.support.rpc_gateway import HOST, running_rpc_gateway, text_of
from tests.support.scripted_engine import ScriptedEngine, Silence, Stop, Until
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card
from tests.support.tls_gateway import DEADLINE_S, Refused, TlsGateway, running_tls_gateway

TOKENIZER = byte_level_tokenizer()
TRANSPORTS = ("http", "rpc")
LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def other() -> Authority:
    return Authority()


def engine() -> ScriptedEngine:
    made = ScriptedEngine([tiny_card(TOKENIZER)])
    made.play([*byte_ids(TOKENIZER, "secret"), Stop()])
    return made


@pytest.fixture
async def gateway(tmp_path: Path, authority: Authority) -> AsyncIterator[TlsGateway]:
    """Asks its clients for nothing."""
    files = TlsFolder(tmp_path).put(authority.server())
    async with running_tls_gateway(engine(), Certificates(files)) as running:
        yield running


@pytest.fixture
async def strict(tmp_path: Path, authority: Authority) -> AsyncIterator[TlsGateway]:
    """Asks its clients for a certificate."""
    files = TlsFolder(tmp_path, asks_clients=True).put(authority.server(), authority)
    async with running_tls_gateway(engine(), Certificates(files)) as running:
        yield running


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_answers_are_streamed(gateway: TlsGateway, authority: Authority, transport: str, host: str) -> None:
    assert await gateway.ask(transport, authority, host=host) == "secret"


async def test_a_client_that_trusts_others_goes_away(
    gateway: TlsGateway, authority: Authority, other: Authority, transport: str
) -> None:
    with pytest.raises(Refused):
        await gateway.ask(transport, other)
    assert gateway.engine.requests == []
    assert await gateway.ask(transport, authority) == "secret"


async def test_a_client_without_tls_fails_at_once(gateway: TlsGateway, authority: Authority, transport: str) -> None:
    with pytest.raises(Refused):
        await gateway.ask(transport, None)
    assert gateway.engine.requests == []
    assert await gateway.ask(transport, authority) == "secret"


async def test_a_client_with_tls_fails_at_once_where_there_is_none(authority: Authority, transport: str) -> None:
    plain = engine()
    async with running_rpc_gateway(plain) as gateway:
        port = gateway.http.port if transport == "http" else gateway.listener.port
        with pytest.raises(OSError):  # noqa: PT011 - an SSL error, or the end of the connection
            await asyncio.wait_for(asyncio.open_connection(HOST, port, ssl=authority.context()), DEADLINE_S)
        assert text_of(await gateway.generate(pb.GenerateRequest(model="tiny", text="x"))) == "secret"


async def test_only_clients_with_a_certificate_are_let_in(
    strict: TlsGateway, authority: Authority, other: Authority, transport: str
) -> None:
    assert await strict.ask(transport, authority, authority.client()) == "secret"
    for client in (None, other.client(), authority.client(is_expired=True)):
        with pytest.raises(Refused):
            await strict.ask(transport, authority, client)
    assert len(strict.engine.requests) == 1
    assert await strict.ask(transport, authority, authority.client()) == "secret"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("version", "is_spoken"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
async def test_versions_before_1_2_are_not_spoken(
    gateway: TlsGateway, authority: Authority, transport: str, version: ssl.TLSVersion, is_spoken: bool
) -> None:
    context = authority.context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.minimum_version = context.maximum_version = version
    port = gateway.port if transport == "http" else gateway.rpc.port
    opening = asyncio.wait_for(asyncio.open_connection(HOST, port, ssl=context), DEADLINE_S)
    if is_spoken:
        _, writer = await opening
        writer.close()
    else:
        with pytest.raises(OSError):  # noqa: PT011 - an SSL error, or the end of the connection
            await opening


async def test_random_bytes_harm_nobody(gateway: TlsGateway, authority: Authority, transport: str) -> None:
    port = gateway.port if transport == "http" else gateway.rpc.port
    for sent in (b"\x16\x03\x01\xff\xff" + bytes(500), b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n", b""):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        writer.write_eof()
        try:
            await asyncio.wait_for(reader.read(), DEADLINE_S)
        except ConnectionError:
            pass
        finally:
            writer.close()
    assert await gateway.ask(transport, authority) == "secret"


async def test_a_client_that_leaves_holds_nothing(gateway: TlsGateway, authority: Authority, transport: str) -> None:
    gateway.engine.play([*byte_ids(TOKENIZER, "a"), Silence()])
    asking = asyncio.create_task(gateway.ask(transport, authority))
    await gateway.engine.until_running(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await gateway.engine.until_running(0)
    await until(lambda: gateway.service.admission.num_running == 0, "no permit is held")


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self) -> None:
        self.now_s += certificates_module.LOOK_S


async def test_renewed_files_are_taken_without_a_restart(
    tmp_path: Path, authority: Authority, other: Authority, transport: str
) -> None:
    folder, clock = TlsFolder(tmp_path, asks_clients=True), Clock()
    files = folder.put(authority.server(), authority)
    async with running_tls_gateway(engine(), Certificates(files, clock)) as gateway:
        assert await gateway.ask(transport, authority, authority.client()) == "secret"
        folder.put(other.server(), other)
        assert await gateway.ask(transport, authority, authority.client()) == "secret"  # not looked at yet
        clock.pass_by()
        assert await gateway.ask(transport, other, other.client()) == "secret"
        for trusted, client in ((authority, authority.client()), (other, authority.client())):
            with pytest.raises(Refused):
                await gateway.ask(transport, trusted, client)


async def test_streams_go_on_over_a_renewal(
    tmp_path: Path, authority: Authority, other: Authority, transport: str
) -> None:
    folder, clock, may_end = TlsFolder(tmp_path), Clock(), asyncio.Event()
    files, scripted = folder.put(authority.server()), engine()
    scripted.play([*byte_ids(TOKENIZER, "a"), Until(may_end), *byte_ids(TOKENIZER, "b"), Stop()])
    async with running_tls_gateway(scripted, Certificates(files, clock)) as gateway:
        asking = asyncio.create_task(gateway.ask(transport, authority))
        await scripted.until_running(1)
        folder.put(other.server())
        clock.pass_by()
        with pytest.raises(Refused):
            await gateway.ask(transport, authority)
        may_end.set()
        assert await asking == "ab"


def half_of_it(folder: TlsFolder, other: Authority) -> None:
    """The certificate has been replaced, its key not yet."""
    folder.files.cert.write_bytes(other.server().cert_chain_pems[0].bytes())


def nothing(folder: TlsFolder, other: Authority) -> None:
    folder.files.key.unlink()


def nonsense(folder: TlsFolder, other: Authority) -> None:
    folder.files.cert.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize("damage", [half_of_it, nothing, nonsense])
async def test_files_that_cannot_be_used_change_nothing(
    tmp_path: Path,
    authority: Authority,
    other: Authority,
    transport: str,
    damage: Callable[[TlsFolder, Authority], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, clock = TlsFolder(tmp_path), Clock()
    files = folder.put(authority.server())
    async with running_tls_gateway(engine(), Certificates(files, clock)) as gateway:
        damage(folder, other)
        for _ in range(3):
            clock.pass_by()
            assert await gateway.ask(transport, authority) == "secret"
        told = [record for record in caplog.records if record.name == "gateway.certificates"]
        assert [record.levelno for record in told] == [logging.ERROR]
        assert "tls_" in told[0].getMessage()
        folder.put(other.server())
        clock.pass_by()
        assert await gateway.ask(transport, other) == "secret"
