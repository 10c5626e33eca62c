"""Page sources and pullers of every transport, made alike for contract tests."""

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from common.transfer.host import host_id
from common.transfer.memory import InProcessTransfer
from common.transfer.pool_memory import PoolMemory
from common.transfer.protocols import PagePuller, PageSource
from common.transfer.puller import Puller, PullReport
from common.transfer.shm_source import SharedMemorySource
from common.transfer.tcp_source import TcpSource

SECRET = "correct horse battery staple"
DEADLINE_S = 10.0


@dataclass
class Network:
    """Makes sources and pullers of one transport, and closes them."""

    kind: str
    directory: Path
    twin: InProcessTransfer = field(default_factory=InProcessTransfer)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    reports: list[PullReport] = field(default_factory=list)

    def source(self, memory: PoolMemory, secret: str = SECRET) -> PageSource:
        match self.kind:
            case "memory":
                source: PageSource = self.twin.source(memory)
            case "shm":
                source = SharedMemorySource(memory, secret, self.directory / "pages.sock")
            case _:
                source = TcpSource(memory, secret, "127.0.0.1")
        self.stack.push_async_callback(source.close)
        return source

    def puller(self, memory: PoolMemory) -> PagePuller:
        if self.kind == "memory":
            return self.twin.puller(memory)
        puller = Puller(memory, SECRET, host_id(), self.kind, self.reports.append)  # type: ignore[arg-type]  # shm, tcp
        self.stack.push_async_callback(puller.close)
        return puller
