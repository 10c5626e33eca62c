"""Which gateway is meant when nobody says so: the one that runs in the usual state directory, else the usual port."""

from common.settings.gateway import DEFAULT_PORT
from tandem.cluster.state import DEFAULT_STATE_DIR, StateDir, url_of


def default_url() -> str:
    """Return the URL of the gateway to talk to."""
    state = StateDir(DEFAULT_STATE_DIR).read_running()
    return url_of("127.0.0.1", DEFAULT_PORT) if state is None else state.url
