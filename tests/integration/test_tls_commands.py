"""Our own commands as clients of a gateway with TLS."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import PeerUnreachable
from common.settings.parse import parse
from gateway.certificates import Certificates
from tandem.client.gateway_client import GatewayClient
from tandem.client.settings import ClientSettings
from tests.support.certificates import Authority, TlsFolder, chain_of
from tests.support.gateway_server import chat_body
from tests.support.scripted_engine import ScriptedEngine, Stop
from tests.support.tiny_tokenizer import byte_ids, byte_level_tokenizer, tiny_card
from tests.support.tls_gateway import TlsGateway, running_tls_gateway

TOKENIZER = byte_level_tokenizer()
AUTHORITY = Authority()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[TlsGateway]:
    """Asks its clients for a certificate."""
    engine = ScriptedEngine([tiny_card(TOKENIZER)])
    engine.play([*byte_ids(TOKENIZER, "ab"), Stop()])
    files = TlsFolder(tmp_path, asks_clients=True).put(AUTHORITY.server(), AUTHORITY)
    async with running_tls_gateway(engine, Certificates(files)) as running:
        yield running


def client(gateway: TlsGateway, *flags: str) -> GatewayClient:
    settings = parse(ClientSettings, flags, {}, "tandem chat")
    return GatewayClient(f"https://127.0.0.1:{gateway.port}", tls=settings.tls())


async def test_a_command_shows_its_certificate(gateway: TlsGateway, tmp_path: Path) -> None:
    own = AUTHORITY.client()
    (tmp_path / "own.pem").write_bytes(chain_of(own))
    (tmp_path / "own.key").write_bytes(own.private_key_pem.bytes())
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    flags = ["--ca", str(tmp_path / "ca.pem"), "--client-cert", str(tmp_path / "own.pem")]
    async with client(gateway, *flags, "--client-key", str(tmp_path / "own.key")) as shows:
        assert await shows.first_model() == "tiny"
        chunks = [chunk async for chunk in shows.stream("/v1/chat/completions", chat_body())]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "ab"


async def test_without_the_authority_it_says_what_is_missing(gateway: TlsGateway) -> None:
    async with client(gateway) as trusts_others:
        with pytest.raises(PeerUnreachable, match="see --ca"):
            await trusts_others.first_model()


async def test_without_a_certificate_the_connection_breaks(gateway: TlsGateway, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    async with client(gateway, "--ca", str(tmp_path / "ca.pem")) as shows_nothing:
        with pytest.raises(PeerUnreachable):
            await shows_nothing.first_model()
