"""What must be true before any process is started; each refusal is one line. Nothing here loads a model."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import InsufficientMemory, InvalidSetting
from common.lifecycle.cpu_flags import computes_bfloat16, cpu_flags
from common.lifecycle.memory import available_memory_bytes
from common.model.locate import default_model_name, locate_model
from common.tls.server_files import server_files_of
from tandem.cluster.ports import addresses_of, bound_socket
from tandem.cluster.settings import UpSettings

RUNTIME_BYTES = 300 << 20
"""What a worker takes before it has a model: importing torch 2.13 alone makes 220 MB resident."""

GGUF_BITS_PER_WEIGHT = 5.0
"""A 4-bit GGUF with its scales; an 8-bit one is overestimated by this, hence refused later or never."""

SAFETENSORS_BITS_PER_WEIGHT = 16.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the model is and the name that clients use for it."""

    path: Path
    name: str


def require_model(settings: UpSettings) -> ModelFiles:
    """Return the model; raise `ModelUnusable` if there is none."""
    path = locate_model(settings.model)
    return ModelFiles(path, settings.served_name or default_model_name(path))


def require_certificates(settings: UpSettings) -> None:
    """Raise `InvalidSetting` if gateways could not use the files that they are told of."""
    files = server_files_of(settings)
    if files is not None:
        files.context()


def require_rpc_port(settings: UpSettings) -> None:
    """Raise `StartupError` if somebody else has the port of the gRPC service, which our gateways share."""
    if settings.rpc_port:
        for address in addresses_of(settings.host):
            bound_socket(settings.host, address, settings.rpc_port, flag="--rpc-port").close()


def require_memory(settings: UpSettings, model: ModelFiles) -> None:
    """Raise `InvalidSetting` for a KV cache larger than this machine, `InsufficientMemory` if all workers do not fit.

    An estimate from the size of the files, and only for a model in the memory of the host.
    """
    if settings.device == "cuda":
        return
    check_memory(
        available=available_memory_bytes(),
        weights=weights_bytes(model.path, _bytes_per_weight(settings.dtype)),
        kv_memory=settings.kv_memory or 0,
        num_workers=settings.prefill + settings.decode,
    )


def check_memory(*, available: int, weights: int, kv_memory: int, num_workers: int) -> None:
    """Raise unless `num_workers` workers with weights and KV cache of these sizes (bytes) fit into `available`."""
    of_all_caches = kv_memory * num_workers
    if of_all_caches > available:
        reason = f"{num_workers} workers would take {_shown(of_all_caches)}, but {_shown(available)} are available"
        raise InvalidSetting("kv_memory", _shown(kv_memory), reason)
    needed = num_workers * (weights + kv_memory + RUNTIME_BYTES)
    if needed > available:
        raise InsufficientMemory(
            f"too little memory: {num_workers} workers need about {_shown(needed)} (weights {_shown(weights)} and KV "
            f"cache {_shown(kv_memory)} each), but {_shown(available)} are available"
        )


def weights_bytes(path: Path, bytes_per_weight: int) -> int:
    """Return about how much the weights of a GGUF file or Hugging Face directory take when loaded."""
    if path.is_file():
        return int(path.stat().st_size * 8 / GGUF_BITS_PER_WEIGHT * bytes_per_weight)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return int(stored * 8 / SAFETENSORS_BITS_PER_WEIGHT * bytes_per_weight)


def _bytes_per_weight(dtype: str) -> int:
    is_half = dtype == "bfloat16" or (dtype == "auto" and computes_bfloat16(cpu_flags()))
    return 2 if is_half else 4


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MIB:.0f} MiB"
