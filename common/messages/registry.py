"""What processes publish about themselves: workers, their load, and the model that they serve."""

import enum

import msgspec

from common.messages.ids import EntryId, Epoch, Fingerprint, ModelName, WorkerId


class Role(enum.StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerHealth(enum.StrEnum):
    """Life of a worker as others see it."""

    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    """Alive, but its engine makes no progress with the work it has: takes no new work until it does."""
    DRAINING = "draining"


class TransferEndpoint(msgspec.Struct, frozen=True):
    """Where a worker's pages can be fetched.

    `socket` is the path of a unix socket that hands out the pool's memfd, None when shared memory is off. `host_id`
    tells whether that socket can be on our host. `host`/`port` is the TCP page server.
    """

    host: str
    port: int
    host_id: str = ""
    socket: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, tag="worker", tag_field="kind"):
    """Who a worker is; constant for one epoch."""

    worker: WorkerId
    role: Role
    epoch: Epoch
    model: ModelName
    fingerprint: Fingerprint
    address: str
    """host:port of the internal gRPC listener."""
    pid: int
    num_blocks: int
    block_size: int
    max_context: int
    max_sequences: int
    transfer: TransferEndpoint | None = None
    metrics_address: str = ""


class StepCost(msgspec.Struct, frozen=True):
    """What a worker's steps take, as it has measured lately: `base_s`, and more for each token and each pair of a token
    and one in its context (see `StepPlan.num_pairs`)."""

    base_s: float
    token_s: float
    pair_s: float

    def step_s(self, num_tokens: int, num_pairs: int) -> float:
        """Return what one step takes, in seconds."""
        return self.base_s + self.token_s * num_tokens + self.pair_s * num_pairs


class WorkerLoad(msgspec.Struct, frozen=True, tag="load", tag_field="kind"):
    """How a worker is doing; sent with every heartbeat.

    `blocks_free` counts blocks that can be taken now, unreferenced cached ones included, but not what is kept for the
    other choices of requests that have begun; `blocks_cached` counts unreferenced cached ones alone. `num_reserved`
    counts sequences that hold pages but do not run (being received). `absorbed` is the newest job read from the stream;
    `num_steps` grows with every engine step.

    `num_bindings` counts hand-overs under way, `num_quarantined` blocks that no sequence owns and a running copy does.
    `is_exclusive`: a suspect request runs alone or waits to, so that others are placed elsewhere. These count since the
    process began: placements taken in and those of them that continue a lost one, prefill tries, messages of superseded
    placements or tries, prompt chunks that a cancellation has spared, and violations of the integrity check.

    `num_uncomputed` counts the tokens of prompts that wait or are being computed; `step_cost` is None until measured.
    """

    health: WorkerHealth
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0
    num_steps: int = 0
    absorbed: EntryId | None = None
    loading_fraction: float = 0.0
    num_bindings: int = 0
    num_quarantined: int = 0
    is_exclusive: bool = False
    num_placements: int = 0
    num_failovers: int = 0
    num_tries: int = 0
    num_stale: int = 0
    num_cancelled_chunks: int = 0
    num_violations: int = 0
    num_uncomputed: int = 0
    step_cost: StepCost | None = None

    @property
    def is_open(self) -> bool:
        """Whether the worker takes new work."""
        return self.health is WorkerHealth.READY and not self.is_exclusive


class WorkerState(msgspec.Struct, frozen=True):
    """A registry row: who, how loaded, and how long ago the last heartbeat came (in Redis time)."""

    record: WorkerRecord
    load: WorkerLoad
    age_s: float


class ModelCard(msgspec.Struct, frozen=True, tag="model_card", tag_field="kind"):
    """All that a gateway needs to serve a model: published by its workers, so that gateways need no model files.

    `tokenizer` is the zlib-compressed tokenizer.json. `eos_ids` is the union of the ids named by generation config,
    tokenizer and model config. `chat_template` None: the model has none and chat is refused. `created` is unix seconds.
    """

    model: ModelName
    fingerprint: Fingerprint
    tokenizer: bytes
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    created: int
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    add_bos: bool = False
    default_temperature: float = 1.0
    default_top_p: float = 1.0
    default_top_k: int = 0
