"""What a worker knows and owns before its weights are loaded: model files, cache geometry, fingerprint, pool memory.

Built once at start, in a thread: it reads files. A worker registers with it, so that loading is visible to others.
"""

import time
from dataclasses import dataclass

import msgspec
import torch

from common.cache.journal import PrefixJournal
from common.cache.layout import KVLayout
from common.cache.pool import BlockPool
from common.cache.prefix import PrefixCache
from common.errors import InsufficientMemory, InvalidSetting
from common.lifecycle.cpu_flags import computes_bfloat16, cpu_flags
from common.lifecycle.memory import available_memory_bytes
from common.messages.ids import Epoch, Fingerprint, ModelName
from common.messages.registry import ModelCard
from common.model.card import build_card
from common.model.checkpoint import Checkpoint, open_checkpoint
from common.model.config import ModelConfig
from common.model.fingerprint import fingerprint
from common.model.kernel_choice import KernelChoice, choose_kernels
from common.model.locate import BUNDLED_TEMPERATURE, BUNDLED_TOP_P, default_model_name, is_bundled, locate_model
from common.settings.engine import EngineSettings
from common.transfer.pool_memory import PoolMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

AUTO_KV_SHARE = 1 / 8
"""Part of the available memory that one worker takes unless told: a host runs several, and weights need room too."""

AUTO_KV_CONTEXTS = 64
"""More than this many longest contexts is not taken unless told."""


@dataclass(frozen=True, slots=True)
class Foundation:
    """`num_blocks` pages of `layout` in `memory`; `max_context` in tokens."""

    epoch: Epoch
    model: ModelName
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    layout: KVLayout
    num_blocks: int
    max_context: int
    fingerprint: Fingerprint
    card: ModelCard
    memory: PoolMemory
    kernels: KernelChoice = "torch"

    def make_cache(self, journal: PrefixJournal | None = None) -> tuple[BlockPool, PrefixCache]:
        """Return the owner of the pool's blocks and its prefix cache; once, for the engine thread."""
        pool = BlockPool(self.num_blocks, self.memory.generations)
        return pool, PrefixCache(pool, self.layout.block_size, self.fingerprint, journal=journal)


def lay_foundation(settings: EngineSettings, epoch: Epoch) -> Foundation:
    """Open the model and map the pool; raises a `StartupError` that says what does not fit."""
    path = locate_model(settings.model)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    device = _device(settings.device)
    kernels = choose_kernels(settings.kernels, device.type)
    dtype_name = _dtype_name(settings.dtype, device)
    layout = config.kv_layout(settings.block_size, dtype_name)
    max_context = _max_context(settings, config)
    num_blocks = _num_blocks(settings, layout, max_context)
    mark = fingerprint(checkpoint.model_hash(), config, layout)
    model = ModelName(settings.served_name or default_model_name(path))
    card = build_card(checkpoint, model=model, fingerprint=mark, max_context=max_context, created=int(time.time()))
    if is_bundled(path):
        card = msgspec.structs.replace(card, default_temperature=BUNDLED_TEMPERATURE, default_top_p=BUNDLED_TOP_P)
    memory = PoolMemory.create(layout, num_blocks, epoch)
    return Foundation(
        epoch,
        model,
        checkpoint,
        device,
        DTYPES[dtype_name],
        layout,
        num_blocks,
        max_context,
        mark,
        card,
        memory,
        kernels,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("device", name, "this build of torch sees no GPU")
    return torch.device(name)


def _dtype_name(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" or computes_bfloat16(cpu_flags()) else "float32"


def _max_context(settings: EngineSettings, config: ModelConfig) -> int:
    wanted = settings.max_context or config.max_context
    if wanted > config.max_context:
        raise InvalidSetting("max_context", wanted, f"the model supports {config.max_context} tokens")
    return wanted


def _num_blocks(settings: EngineSettings, layout: KVLayout, max_context: int) -> int:
    """Return the pool's size: what was asked for, else a share of the memory, at least one longest context."""
    needed = layout.num_blocks_for(max_context)
    available = available_memory_bytes()
    if settings.kv_memory is not None:
        num_blocks = settings.kv_memory // layout.page_bytes
        if settings.kv_memory > available:
            raise InsufficientMemory(f"kv_memory asks for {settings.kv_memory} bytes, {available} are available")
    else:
        num_blocks = min(int(available * AUTO_KV_SHARE) // layout.page_bytes, AUTO_KV_CONTEXTS * needed)
    if num_blocks < needed:
        raise InsufficientMemory(
            f"the longest context of {max_context} tokens needs {needed * layout.page_bytes} bytes of KV cache, "
            f"but only {num_blocks * layout.page_bytes} are set aside: raise kv_memory or lower max_context"
        )
    return num_blocks
