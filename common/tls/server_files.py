"""What a server shows to its clients, and whom it lets in by their certificates."""

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from common.settings.serving import ServingSettings
from common.tls.pem import load_authorities, load_pair, require_file

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files. `client_ca` has the authorities of the clients' certificates, None: clients need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return what the files make; raise `InvalidSetting` naming the one that cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        load_pair(context, ("tls_cert", self.cert), ("tls_key", self.key))
        if self.client_ca is not None:
            load_authorities(context, "tls_client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def is_key_exposed(self) -> bool:
        """Whether every user of this host may read the key."""
        return bool(self.key.stat().st_mode & stat.S_IROTH)

    def signature(self) -> Signature:
        """Return what changes when one of the files does; raise `InvalidSetting` for one that is missing."""
        named = [("tls_cert", self.cert), ("tls_key", self.key)]
        if self.client_ca is not None:
            named.append(("tls_client_ca", self.client_ca))
        found = [require_file(name, path) for name, path in named]
        return tuple((file.st_mtime_ns, file.st_size, file.st_ino) for file in found)


def server_files_of(settings: ServingSettings) -> ServerFiles | None:
    """Return the files that gateways are told of, None: they listen without TLS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
