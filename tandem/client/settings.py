"""How a command of ours reaches a gateway."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from common.settings.readers import auto, path, text
from common.settings.setting import setting
from common.tls.client_context import client_context


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings of a client of a gateway."""

    url: str | None = setting(None, "gateway; auto: the one that runs here", auto(text))
    api_key: str = setting("", "API key that the gateway asks for", text, is_secret=True)
    ca: Path | None = setting(
        None, "PEM file of the authorities to trust for https; auto: those of this system", auto(path)
    )
    client_cert: Path | None = setting(None, "PEM file of the certificate that the gateway asks for", auto(path))
    client_key: Path | None = setting(None, "PEM file of its key", auto(path))

    def tls(self) -> ssl.SSLContext | None:
        """Return what https uses, None: what is usual; raise `InvalidSetting`."""
        if self.ca is None and self.client_cert is None and self.client_key is None:
            return None
        return client_context(self.ca, self.client_cert, self.client_key)
