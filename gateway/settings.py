"""What the HTTP side of a gateway is told; built once by the process entry."""

import dataclasses
from dataclasses import dataclass

from common.errors import InvalidSetting

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Frozen settings of one gateway; a value that cannot work raises `InvalidSetting`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes any free port."""
    reuse_port: bool = False
    """Several gateways share the port; the kernel spreads connections over them."""
    max_body_bytes: int = 8 * MIB
    max_concurrent_requests: int = 1024
    keep_alive_s: float = 75.0
    """An idle connection is closed after this long: longer than the usual idle time of proxies (60 s)."""
    body_timeout_s: float = 60.0
    """A body that takes longer to arrive is refused."""
    ping_interval_s: float = 10.0
    """A quiet stream carries a comment this often."""
    write_timeout_s: float = 30.0
    """A client that takes no bytes for so long is dropped."""
    max_silence_s: float = 300.0
    """A request whose engine says nothing for so long has failed."""
    deadline_s: float | None = None
    """The time of a request that names none; None: without end."""
    render_timeout_s: float = 2.0
    """A chat template that takes longer is given up."""
    num_tokenizer_threads: int = 2
    grammar_timeout_s: float = 3.0
    """A grammar that takes longer to compile is refused; usual ones take 2 ms, the largest ones 0.5 s."""
    num_grammar_compilers: int = 2
    """Processes that compile grammars, of up to 100 MB each; they are started when they are needed."""
    vllm_metrics: bool = False
    """Also export the metrics under vLLM's names."""
    open_metrics: bool = True
    """`/metrics` needs no API key."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidSetting("port", self.port, "must be 0..65535")
        for name in ("max_body_bytes", "max_concurrent_requests", "num_tokenizer_threads", "num_grammar_compilers"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")
        for name in [field.name for field in dataclasses.fields(self) if field.name.endswith("_s")]:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidSetting(name, value, "must be positive")
