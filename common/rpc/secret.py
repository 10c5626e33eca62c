"""The cluster's shared secret as gRPC metadata."""

from common.errors import InvalidSetting

METADATA_KEY = "tandem-secret"


def checked_secret(secret: str) -> str:
    """Return `secret` if it can travel as metadata; raise `InvalidSetting`, which does not repeat it, otherwise."""
    if not secret:
        raise InvalidSetting("secret", "", "the cluster's secret must not be empty")
    if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
        raise InvalidSetting("secret", "***", "only printable ASCII, no spaces at the ends")
    return secret
