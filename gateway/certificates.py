"""The certificates of a running gateway, read again when their files change, so that no renewal needs a restart.

Each handshake, of HTTP and gRPC alike, takes what was read last; connections that are open stay as they are. Files that
cannot be used change nothing but the log. gRPC asks from threads of its own.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from common.errors import InvalidSetting
from common.tls.server_files import ServerFiles, Signature

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often, at most, the files are looked at."""


@dataclass(frozen=True, slots=True)
class _Identity:
    """What one state of the files makes."""

    context: ssl.SSLContext
    configuration: grpc.ServerCertificateConfiguration


class Certificates:
    """Raises `InvalidSetting` if its files cannot be used at the beginning."""

    def __init__(self, files: ServerFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._signature: Signature | None = files.signature()
        self._looked_s = clock()
        self._current = _read(files)
        self.context = self._first_context()
        """For HTTP listeners."""
        if files.is_key_exposed:
            logger.warning("every user of this host may read the key in %s", files.key)

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a gRPC listener is secured by."""
        given = self._current

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            current = self._look()
            if current is given:
                return None
            given = current
            return current.configuration

        asks_clients = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(
            given.configuration,
            fetch,  # type: ignore[arg-type]  # None, which its stub does not know, is: as before
            asks_clients,
        )

    def _first_context(self) -> ssl.SSLContext:
        """Return a context whose handshakes go on with the current one, its authorities included."""
        context = self._files.context()

        def hand_over(handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            handshake.context = self._look().context

        context.sni_callback = hand_over  # called with and without a name
        return context

    def _look(self) -> _Identity:
        with self._lock:
            now = self._clock()
            if now - self._looked_s >= LOOK_S:
                self._looked_s = now
                try:
                    self._refresh()
                except InvalidSetting as error:
                    logger.error("certificates stay as they were: %s", error)  # noqa: TRY400 - its words say it all
            return self._current

    def _refresh(self) -> None:
        try:
            signature = self._files.signature()
        except InvalidSetting:
            if self._signature is None:
                return  # told before
            self._signature = None
            raise
        if signature == self._signature:
            return
        self._signature = signature
        current = _read(self._files)
        if self._files.signature() == signature:
            self._current = current
            logger.info("certificates read again")
        else:  # changed meanwhile: what was read may be half of each
            self._signature = None


def _read(files: ServerFiles) -> _Identity:
    context = files.context()
    roots = None if files.client_ca is None else files.client_ca.read_bytes()
    pair = (files.key.read_bytes(), files.cert.read_bytes())
    return _Identity(context, grpc.ssl_server_certificate_configuration([pair], roots))
