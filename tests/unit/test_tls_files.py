"""TLS files that a process refuses to start with, each by a line that says what is wrong with which."""

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from common.errors import InvalidSetting
from common.settings.gateway import GatewayProcessSettings
from common.settings.parse import parse
from common.settings.serving import ServingSettings
from common.settings.setting import environment_of
from common.tls.client_context import client_context
from common.tls.server_files import ServerFiles, server_files_of
from gateway import certificates as certificates_module
from gateway.certificates import Certificates
from tandem.cluster.preflight import require_certificates
from tandem.cluster.settings import UpSettings
from tandem.cluster.state import url_of
from tests.support.certificates import Authority, TlsFolder

AUTHORITY = Authority()


@pytest.fixture
def folder(tmp_path: Path) -> TlsFolder:
    made = TlsFolder(tmp_path, asks_clients=True)
    made.put(AUTHORITY.server(), AUTHORITY)
    return made


def test_good_files_make_a_context_that_asks_for_certificates(folder: TlsFolder) -> None:
    context = folder.files.context()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert ServerFiles(folder.files.cert, folder.files.key).context().verify_mode is ssl.CERT_NONE


def another_key(files: ServerFiles) -> None:
    files.key.write_bytes(AUTHORITY.server().private_key_pem.bytes())


def encrypted_key(files: ServerFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")))


def swapped(files: ServerFiles) -> None:
    cert, key = files.cert.read_bytes(), files.key.read_bytes()
    files.cert.write_bytes(key)
    files.key.write_bytes(cert)


def missing_cert(files: ServerFiles) -> None:
    files.cert.unlink()


def missing_key(files: ServerFiles) -> None:
    files.key.unlink()


def folder_as_ca(files: ServerFiles) -> None:
    assert files.client_ca is not None
    files.client_ca.unlink()
    files.client_ca.mkdir()


def broken_key(files: ServerFiles) -> None:
    files.key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")


def broken_ca(files: ServerFiles) -> None:
    assert files.client_ca is not None
    files.client_ca.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


def empty_ca(files: ServerFiles) -> None:
    assert files.client_ca is not None
    files.client_ca.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (another_key, r"tls_key='.*key.pem': is not the key of the certificate in .*cert.pem"),
        (encrypted_key, r"tls_key=.*is encrypted"),
        (swapped, r"tls_cert=.*has no certificate in PEM form"),
        (missing_cert, r"tls_cert=.*No such file"),
        (missing_key, r"tls_key=.*No such file"),
        (broken_key, r"tls_key=.*cannot be used with"),
        (folder_as_ca, r"tls_client_ca=.*directory"),
        (broken_ca, r"tls_client_ca=.*cannot be used"),
        (empty_ca, r"tls_client_ca=.*has no certificate"),
    ],
)
def test_bad_files_are_named(folder: TlsFolder, damage: Callable[[ServerFiles], None], complaint: str) -> None:
    damage(folder.files)
    with pytest.raises(InvalidSetting, match=complaint) as refusal:
        folder.files.context()
    assert "\n" not in str(refusal.value)
    with pytest.raises(InvalidSetting, match="tls_"):
        Certificates(folder.files)


def test_files_that_change_while_they_are_read_are_read_again(
    folder: TlsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    certificates = Certificates(folder.files, lambda: now_s[0])
    read, was_changed = certificates_module._read, list[object]()

    def read_while_they_change(files: ServerFiles) -> object:
        identity = read(files)
        if not was_changed:
            was_changed.append(identity)
            folder.put(AUTHORITY.server())
        return identity

    monkeypatch.setattr(certificates_module, "_read", read_while_they_change)
    folder.put(AUTHORITY.server())
    first = certificates._look()
    now_s[0] += certificates_module.LOOK_S
    assert certificates._look() is first
    now_s[0] += certificates_module.LOOK_S
    assert certificates._look() not in (first, *was_changed)


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_may_read_is_told(
    folder: TlsFolder, mode: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder.files.key.chmod(mode)
    Certificates(folder.files)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_told


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--tls-cert", "c"], "tls_key"),
        (["--tls-key", "k"], "tls_cert"),
        (["--tls-client-ca", "a"], "tls_client_ca"),
    ],
)
def test_files_that_need_each_other(flags: list[str], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        parse(ServingSettings, flags, {}, "gateway")


def test_a_cluster_checks_the_files_and_hands_them_on(folder: TlsFolder) -> None:
    files = folder.files
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(files.client_ca)]
    up = parse(UpSettings, flags, {}, "tandem up")
    require_certificates(up)
    environment = {"TANDEM_SECRET": "a secret for tests", **environment_of(up, ServingSettings)}
    assert server_files_of(parse(GatewayProcessSettings, [], environment, "gateway")) == files
    another_key(files)
    with pytest.raises(InvalidSetting, match="tls_key"):
        require_certificates(up)


def test_without_files_there_is_no_tls() -> None:
    assert server_files_of(ServingSettings()) is None


def test_clients_with_certificates_are_known_also_from_other_hosts(folder: TlsFolder) -> None:
    cert, key = folder.files.cert, folder.files.key
    with pytest.raises(InvalidSetting, match="nobody would need"):
        ServingSettings(tls_cert=cert, tls_key=key).refuse_exposure("0.0.0.0")
    ServingSettings(tls_cert=cert, tls_key=key, tls_client_ca=cert).refuse_exposure("0.0.0.0")


@pytest.mark.parametrize("host", ["0.0.0.0", "::1"])
def test_addresses_say_whether_there_is_tls(host: str) -> None:
    assert url_of(host, 1, is_tls=True) == url_of(host, 1).replace("http", "https")


def test_a_client_needs_certificate_and_key(folder: TlsFolder) -> None:
    cert, key = folder.files.cert, folder.files.key
    assert client_context(folder.files.client_ca, cert, key).verify_mode is ssl.CERT_REQUIRED
    assert client_context(None, None, None).verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(InvalidSetting, match="client_key"):
        client_context(None, cert, None)
    with pytest.raises(InvalidSetting, match="client_cert"):
        client_context(None, None, key)
    with pytest.raises(InvalidSetting, match="ca="):
        client_context(Path(os.devnull), None, None)
