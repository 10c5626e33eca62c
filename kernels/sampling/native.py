"""Launcher of native sampling: all rows of a step in one call. Packs their parameters as `adjust.h` reads them.

What a row does not use is not packed: the history goes only to penalties, and costs about 16 ns a token there.
"""

import ctypes
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.native.library import Library
from kernels.sampling.row import SamplingRow

INVALID = -1
VIOLATED = -2
"""What a row has instead of a token, as in cpu.h."""

_ROW = struct.Struct("=6d3Q12q")
_MASK = (1 << 64) - 1
_NO_DEMANDS = (0,) * 11


class PackedRows:
    """`SamplingParameters` of each row at `address`, with the arrays that they point to; the rows outlive it."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int) -> None:
        self._arrays: list[array[Any]] = []
        self._parameters = bytearray(_ROW.size * len(rows))
        for index, row in enumerate(rows):
            self._pack(index * _ROW.size, row, vocab)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._parameters))

    def _pack(self, offset: int, row: SamplingRow, vocab: int) -> None:
        controls = row.controls
        _ROW.pack_into(
            self._parameters,
            offset,
            controls.temperature,
            controls.top_p,
            controls.min_p,
            controls.presence_penalty,
            controls.frequency_penalty,
            controls.repetition_penalty,
            controls.seed & _MASK,
            row.choice & _MASK,
            row.position & _MASK,
            min(controls.top_k, vocab),
            *(self._demands(row, vocab) if row.is_adjusted else _NO_DEMANDS),
        )

    def _demands(self, row: SamplingRow, vocab: int) -> tuple[int, ...]:
        """Return what changes the row's logits."""
        bias = [(token, addend) for token, addend in row.controls.logit_bias if 0 <= token < vocab]
        held_back = [token for token in row.controls.stop_ids if 0 <= token < vocab] if row.must_continue else []
        # Only the repetition penalty looks at the prompt.
        first = 0 if row.controls.repetition_penalty != 1.0 else row.num_prompt
        history = row.token_ids[first:] if row.is_penalised else ()
        return (
            self._address("q", [token for token, _ in bias]),
            self._address("d", [addend for _, addend in bias]),
            len(bias),
            self._address("q", held_back),
            len(held_back),
            self._address("q", history),
            len(history),
            row.num_prompt - first,
            *_packed_mask(row.allowed),
        )

    def _address(self, typecode: str, items: Sequence[Any]) -> int:
        if not items:
            return 0
        self._arrays.append(array(typecode, items))
        return self._arrays[-1].buffer_info()[0]


def choose(
    library: Library, logits: torch.Tensor, rows: Sequence[SamplingRow], num_threads: int | None = None
) -> list[int]:
    """Return the token of each row of `logits` [num_rows, vocab] fp32 on the CPU, or `INVALID` or `VIOLATED`.

    `num_threads` None: as many as torch uses.
    """
    if not rows:
        return []
    logits = _with_dense_rows(logits)
    vocab = logits.shape[1]
    packed = PackedRows(rows, vocab)
    tokens = array("q", bytes(8 * len(rows)))
    _entry(library, "tandem_sample")(
        logits.data_ptr(),
        *(len(rows), vocab, logits.stride(0)),
        packed.address,
        tokens.buffer_info()[0],
        num_threads or torch.get_num_threads(),
    )
    return tokens.tolist()


def logprobs(
    library: Library, logits: torch.Tensor, tokens: Sequence[int], num_top: int, num_threads: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logprobs [num_rows] fp64 of `tokens`, ids [num_rows, num_top] int64 of the likeliest, and theirs fp64.

    `logits` is [num_rows, vocab] fp32 on the CPU, `num_top` at most vocab.
    """
    logits = _with_dense_rows(logits)
    num_rows, vocab = logits.shape
    assert 0 <= num_top <= vocab, (num_top, vocab)
    assert all(0 <= token < vocab for token in tokens), tokens
    chosen = array("q", tokens)
    of_tokens = torch.empty(num_rows, dtype=torch.float64)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64)
    of_top = torch.empty(num_rows, num_top, dtype=torch.float64)
    _entry(library, "tandem_logprobs")(
        logits.data_ptr(),
        *(num_rows, vocab, logits.stride(0)),
        chosen.buffer_info()[0],
        num_top,
        *(of_tokens.data_ptr(), top_ids.data_ptr(), of_top.data_ptr()),
        num_threads or torch.get_num_threads(),
    )
    return of_tokens, top_ids, of_top


def _packed_mask(allowed: torch.Tensor | None) -> tuple[int, int, int]:
    if allowed is None:
        return 0, 0, 0
    assert allowed.dtype == torch.int32, allowed.dtype
    assert allowed.ndim == 1, allowed.shape
    assert allowed.is_cpu, allowed.device
    assert allowed.is_contiguous(), allowed.stride()
    return 1, allowed.data_ptr(), len(allowed)


def _with_dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits`, copied if the numbers of a row do not follow each other."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_cpu, logits.device
    assert logits.shape[1] > 0, logits.shape
    return logits if logits.stride(1) == 1 else logits.contiguous()


_POINTER, _COUNT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_ARGUMENTS = {
    "tandem_sample": (_POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _POINTER, _THREADS),
    "tandem_logprobs": (
        *(_POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _COUNT),
        *(_POINTER, _POINTER, _POINTER, _THREADS),
    ),
}


@functools.cache
def _entry(library: Library, name: str) -> Callable[..., None]:
    function = library.functions[name]
    function.argtypes = _ARGUMENTS[name]
    function.restype = None
    entry: Callable[..., None] = function
    return entry
