"""What a client trusts, and what it shows to a server that asks for a certificate."""

import ssl
from pathlib import Path

from common.errors import InvalidSetting
from common.tls.pem import load_authorities, load_pair


def client_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Return what trusts the authorities in `ca` (None: those of this system) and shows `cert`, if there is one.

    Raises `InvalidSetting` naming `ca`, `client_cert` or `client_key`.
    """
    if (cert is None) != (key is None):
        name = "client_key" if key is None else "client_cert"
        raise InvalidSetting(name, None, "certificate and key are needed together")
    context = ssl.create_default_context() if ca is None else _trusting(ca)
    if cert is not None and key is not None:
        load_pair(context, ("client_cert", cert), ("client_key", key))
    return context


def _trusting(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_authorities(context, "ca", ca)
    return context
