"""Certificates for tests: authorities, and the files that a gateway is told of."""

import datetime
import os
import ssl
from pathlib import Path

import grpc
import trustme

from common.tls.server_files import ServerFiles

LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Issues certificates for servers on this host and for clients."""

    def __init__(self) -> None:
        self.ca = trustme.CA()
        self.pem = self.ca.cert_pem.bytes()

    def server(self) -> trustme.LeafCert:
        return self.ca.issue_cert("127.0.0.1", "localhost")

    def client(self, *, is_expired: bool = False) -> trustme.LeafCert:
        if is_expired:
            return self.ca.issue_cert("client", not_before=LONG_AGO, not_after=LONG_AGO + datetime.timedelta(days=1))
        return self.ca.issue_cert("client")

    def context(self, client: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """What a client of HTTP uses that trusts this authority."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        if client is not None:
            client.configure_cert(context)
        return context

    def credentials(self, client: trustme.LeafCert | None = None) -> grpc.ChannelCredentials:
        """What a client of gRPC uses that trusts this authority."""
        if client is None:
            return grpc.ssl_channel_credentials(self.pem)
        return grpc.ssl_channel_credentials(self.pem, client.private_key_pem.bytes(), chain_of(client))


def chain_of(cert: trustme.LeafCert) -> bytes:
    return b"".join(part.bytes() for part in cert.cert_chain_pems)


class TlsFolder:
    """The files of one gateway."""

    def __init__(self, folder: Path, *, asks_clients: bool = False) -> None:
        client_ca = folder / "client-ca.pem" if asks_clients else None
        self.files = ServerFiles(folder / "cert.pem", folder / "key.pem", client_ca)

    def put(self, cert: trustme.LeafCert, clients: Authority | None = None) -> ServerFiles:
        """Replace the files, each in one step."""
        _replace(self.files.cert, chain_of(cert))
        _replace(self.files.key, cert.private_key_pem.bytes())
        if clients is not None:
            assert self.files.client_ca is not None
            _replace(self.files.client_ca, clients.pem)
        return self.files


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    os.replace(draft, path)  # noqa: PTH105 - named after what it does
