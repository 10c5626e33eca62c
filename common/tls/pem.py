"""PEM files into an `ssl.SSLContext`; what cannot be used is an `InvalidSetting` that names setting and file."""

import os
import ssl
from pathlib import Path

from common.errors import InvalidSetting

NamedFile = tuple[str, Path]
"""The setting that names the file, and the file."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = b"PRIVATE KEY-----"


class _EncryptedKey(ValueError):
    """The key asks for a passphrase, which nobody could type."""


def require_file(name: str, path: Path) -> os.stat_result:
    """Return what the file is like; raise `InvalidSetting` if there is none."""
    try:
        return path.stat()
    except OSError as error:
        raise InvalidSetting(name, str(path), error.strerror or "cannot be read") from error


def load_pair(context: ssl.SSLContext, cert: NamedFile, key: NamedFile) -> None:
    """Load a certificate with its chain, and its key."""
    _require_part(cert, _CERTIFICATE, "has no certificate in PEM form")
    _require_part(key, _KEY, "has no private key in PEM form")
    try:
        context.load_cert_chain(cert[1], key[1], password=_no_passphrase)
    except _EncryptedKey as error:
        raise InvalidSetting(key[0], str(key[1]), "is encrypted: there is nobody to ask for its passphrase") from error
    except ssl.SSLError as error:
        name, path = key
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidSetting(name, str(path), f"is not the key of the certificate in {cert[1]}") from error
        raise InvalidSetting(name, str(path), f"cannot be used with {cert[1]}: {_reason(error)}") from error


def load_authorities(context: ssl.SSLContext, name: str, path: Path) -> None:
    """Trust the certificates in a file, besides those that the context trusts already."""
    _require_part((name, path), _CERTIFICATE, "has no certificate in PEM form")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidSetting(name, str(path), f"cannot be used: {_reason(error)}") from error


def _require_part(file: NamedFile, part: bytes, reason: str) -> None:
    name, path = file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidSetting(name, str(path), error.strerror or "cannot be read") from error
    if part not in content:
        raise InvalidSetting(name, str(path), reason)


def _no_passphrase() -> str:
    raise _EncryptedKey


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
