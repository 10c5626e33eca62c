"""What the workers of one model are told about the model, the KV cache and the batch; `tandem up` takes the same."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InvalidSetting
from common.settings.process import ProcessSettings
from common.settings.readers import auto, boolean, integer, number, path, power_of_two, size_bytes, text
from common.settings.setting import setting

DEFAULT_MODEL = "smollm2"
TRANSFERS = ("auto", "shm", "tcp")
DTYPES = ("auto", "bfloat16", "float32")
DISAGGREGATIONS = ("auto", "always", "never")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "torch")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(ProcessSettings):
    """Settings of the engine, the same for all workers of a model."""

    model: str = setting(DEFAULT_MODEL, "a GGUF file, a Hugging Face directory, or the name of a bundled model", text)
    served_name: str | None = setting(None, "name that clients use; auto: taken from --model", auto(text))
    device: str = setting("auto", "where the model runs", text, choices=DEVICES)
    kernels: str = setting(
        "auto",
        "what computes on CPUs; native: compiled kernels; torch: torch's operators; auto: native where they are built",
        text,
        choices=KERNELS,
    )
    dtype: str = setting(
        "auto",
        "type of weights and KV cache; auto: bfloat16 where the hardware computes in it, else float32",
        text,
        choices=DTYPES,
    )
    weights_dir: Path | None = setting(
        None,
        "folder in memory where workers of a host share one copy of the weights (native kernels); auto: /dev/shm",
        auto(path),
    )
    transfer: str = setting("auto", "way of pages between workers; auto: shm on one host", text, choices=TRANSFERS)
    block_size: int = setting(16, "tokens in a block of the KV cache, a power of two", power_of_two(1, 1024))
    kv_memory: int | None = setting(
        None, "size of each worker's KV cache, e.g. 2GiB; auto: by the memory at hand", auto(size_bytes)
    )
    max_context: int | None = setting(
        None, "longest prompt and answer together; auto: what the model allows", auto(integer(1)), unit="tokens"
    )
    max_sequences: int = setting(64, "sequences in one batch of a worker", integer(1, 65536))
    chunk_size: int = setting(256, "longest part of a prompt that one step computes", integer(1), unit="tokens")
    token_budget: int = setting(
        512, "most that one step computes for all sequences together", integer(1), unit="tokens"
    )
    threads: int | None = setting(None, "threads of a worker; auto: its share of the cores", auto(integer(1, 4096)))
    engine_niceness: int | None = setting(
        None,
        "by how much a worker's computing lets others go first that want its cores (Linux); auto: 5 on CPUs, 0 on GPUs",
        auto(integer(0, 19)),
    )
    disaggregation: str = setting(
        "auto",
        "auto: each prompt is prefilled where its first token is expected sooner, by measured rates; "
        "always: on prefill workers; never: where it is decoded",
        text,
        choices=DISAGGREGATIONS,
    )
    local_prefill_max_tokens: int = setting(
        16, "prompts whose uncached part is no longer are prefilled where they are decoded", integer(0), unit="tokens"
    )
    itl_target_ms: float = setting(
        100.0,
        "how long a step should take at most that computes parts of prompts beside running sequences",
        number(1, 60_000),
        unit="ms",
    )
    stall_s: float = setting(
        10.0,
        "an engine that finishes no step for so long is stalled: its work moves",
        number(0.1, 3600),
        unit="seconds",
    )
    verify_pages: bool = setting(False, "checksum every page before and after its transfer (for debugging)", boolean)
    lease_s: float = setting(6.0, "how long a silent peer's pages are held", number(0.1, 3600), unit="seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise InvalidSetting("model", self.model, "must name a model")
        if self.chunk_size > self.token_budget:
            raise InvalidSetting(
                "chunk_size", self.chunk_size, f"must not exceed token_budget ({self.token_budget} tokens)"
            )
