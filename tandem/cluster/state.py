"""The state directory of one cluster on one host: what `up` leaves there for `down`, `status` and `chat`.

cluster.json    what runs (mode 0600: it holds the URL of Redis, password included)
lock            held by the supervisor as long as it lives
secret          shared secret of internal calls (mode 0600)
logs/           one file per process; supervisor.log tells of their deaths
run/            sockets; gone when the cluster is down
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.errors import InvalidSetting, StartupError
from common.lifecycle.exit_codes import one_line
from tandem.cluster.identity import ProcessRef, is_running
from tandem.invocation import invocation

DEFAULT_STATE_DIR = Path(".tandem")
RUN_DIR_PREFIX = "tandem-run-"
LONGEST_SOCKET_FOLDER = 70
"""Bytes; a unix socket's whole path must stay under 108 (104 on macOS)."""


class ProcessEntry(msgspec.Struct, frozen=True):
    """A supervised process: its seat's name, its role, who sits there now (None: between two lives), how often it
    was started again, and why it was not (see `Child.trouble`).
    """

    name: str
    role: str
    ref: ProcessRef | None
    restarts: int = 0
    trouble: str = ""


class ClusterState(msgspec.Struct, frozen=True):
    """Content of cluster.json."""

    supervisor: ProcessRef
    model: str
    redis_url: str
    host: str
    port: int
    run_dir: str
    is_ready: bool = False
    processes: tuple[ProcessEntry, ...] = ()
    rpc_port: int = 0
    is_tls: bool = False

    @property
    def url(self) -> str:
        """Where clients reach the gateways from this host."""
        return url_of(self.host, self.port, is_tls=self.is_tls)


class StateDir:
    """Owns the files of one state directory; only the holder of its lock writes."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def cluster_file(self) -> Path:
        """What runs."""
        return self.path / "cluster.json"

    @property
    def secret_file(self) -> Path:
        """The cluster's secret."""
        return self.path / "secret"

    def log_file(self, name: str) -> Path:
        """Return where a process writes."""
        return self.path / "logs" / f"{name}.log"

    def create(self) -> None:
        """Make the folders; raise `InvalidSetting` where that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.path / "logs").mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidSetting("state_dir", str(self.path), error.strerror or one_line(error)) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory; raise `StartupError` if a living supervisor holds it. The kernel drops a dead one's."""
        with (self.path / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                stop = f"{invocation()} down --state-dir {self.path}"
                raise StartupError(f"a cluster already runs in {self.path} (stop it with: {stop})") from error
            yield

    def read(self) -> ClusterState | None:
        """Return what was written last, None if there is nothing readable."""
        try:
            return msgspec.json.decode(self.cluster_file.read_bytes(), type=ClusterState)
        except (OSError, msgspec.DecodeError):
            return None

    def read_running(self) -> ClusterState | None:
        """Return the state of a cluster whose supervisor lives, else None."""
        state = self.read()
        return state if state is not None and is_running(state.supervisor) else None

    def write(self, state: ClusterState) -> None:
        """Replace cluster.json in one step."""
        write_private(self.cluster_file, msgspec.json.format(msgspec.json.encode(state), indent=2))

    def forget(self) -> None:
        """Remove what only a running cluster has; logs and secret stay."""
        self.cluster_file.unlink(missing_ok=True)

    def obtain_secret(self, given: str) -> None:
        """Store the secret that was given, else keep the stored one, else draw one."""
        if given:
            write_private(self.secret_file, given.encode())
        elif not self.secret_file.exists():
            write_private(self.secret_file, secrets.token_hex(32).encode())

    def create_run_dir(self) -> Path:
        """Return a new folder for sockets: inside, or in the temporary folder when the path would be too long."""
        inside = self.path / "run"
        if len(os.fsencode(inside)) > LONGEST_SOCKET_FOLDER:
            return Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
        inside.mkdir(mode=0o700, exist_ok=True)
        return inside

    def remove_run_dir(self, run_dir: Path) -> None:
        """Remove the sockets of a cluster that is down; a folder that `create_run_dir` cannot have made stays."""
        if run_dir == self.path / "run" or run_dir.name.startswith(RUN_DIR_PREFIX):
            shutil.rmtree(run_dir, ignore_errors=True)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step; nobody else can read it, at no moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the URL under which this host reaches a listener on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"
