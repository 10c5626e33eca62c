"""Launcher of the native decoder: one call per step through all layers."""

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.decoder.parameters import (
    BatchStructure,
    DecoderShape,
    DecoderStructure,
    DecoderWeights,
    decoder_structure,
    int64_array,
)
from kernels.native.arguments import address, count, dtype_number
from kernels.native.library import Library

_ERRORS = {
    1: "a token id is not in the vocabulary",
    2: "a slot is not in the pages",
    3: "a wanted row is not in the batch",
    4: "the lengths do not fit each other, the tokens or the block tables",
    5: "a block is not in the pages",
}


class Board(Protocol):
    """Says which cores are in use."""

    @property
    def address(self) -> int:
        """Where it has an uint32 per core, not 0 while the core is in use."""


@dataclass(frozen=True, slots=True)
class BorrowedCores:
    """Cores of other processes, to compute on while `board` says that they are idle."""

    cores: tuple[int, ...]
    board: Board


class NativeDecoder:
    """A decoder with threads of its own; the caller's is one of them. Threads may share it, their calls take turns.

    Its threads start with the first call, with the niceness and cores of the thread that makes it, and sleep between
    calls; besides, there is one on each of the `borrowed` cores, for as long as that is idle. Keeps `weights` and the
    board alive.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        num_threads: int,
        library: Library,
        borrowed: BorrowedCores | None = None,
    ) -> None:
        assert num_threads >= 1, num_threads
        cores = borrowed.cores if borrowed else ()
        self.shape = shape
        self.weights = weights
        self._functions = _declared(library)
        self._lock = threading.Lock()
        structure = decoder_structure(shape, weights)
        self._handle: int = self._functions.tandem_decoder_new(
            dtype_number(weights.head.dtype),
            ctypes.byref(structure),
            num_threads,
            (ctypes.c_int32 * len(cores))(*cores),
            len(cores),
            borrowed.board.address if borrowed else None,
        )
        self._finalizer = weakref.finalize(self, _delete, self._functions, self._handle, (weights, borrowed))

    def close(self) -> None:
        """End the threads; idempotent. No call is in progress or follows."""
        self._finalizer()

    def forward(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        block_tables: torch.Tensor,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        pages: torch.Tensor,
    ) -> torch.Tensor:
        """Write keys and values of a step's tokens into `pages`; return normed hidden states [num_wanted, hidden_size].

        `token_ids`, `slots` [num_tokens], `wanted` [num_wanted] (rows of the batch) and `block_tables`
        [num_seqs, max_blocks] are int64; `cos`, `sin` [num_tokens, head_dim / 2] fp32. The tokens of sequence i, the
        last `query_lengths[i]` of `context_lengths[i]`, follow those of sequence i - 1. Slot s is token
        `s % block_size` of block `s // block_size`. `pages` is [num_blocks, num_layers, 2, num_kv_heads, block_size,
        head_dim]. All are contiguous. A row's result depends on its own context alone. Raises `IndexError` for numbers
        that name nothing.
        """
        self._check(token_ids, cos, sin, slots, wanted, block_tables, pages)
        assert len(query_lengths) == len(context_lengths) == len(block_tables)
        hidden = torch.empty(len(wanted), self.weights.head.num_in, dtype=pages.dtype)
        batch = BatchStructure(
            len(token_ids),
            address(token_ids),
            address(cos),
            address(sin),
            address(slots),
            len(wanted),
            address(wanted),
            len(query_lengths),
            int64_array(query_lengths),
            int64_array(context_lengths),
            address(block_tables),
            block_tables.shape[1],
            pages.shape[0],
            pages.shape[4],
            address(pages),
            address(hidden),
        )
        with self._lock:
            error = self._functions.tandem_decoder_forward(self._handle, ctypes.byref(batch))
        if error:
            raise IndexError(_ERRORS[error])
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [num_rows, vocab_size] fp32 of hidden states [num_rows, hidden_size], contiguous."""
        head = self.weights.head
        assert hidden.ndim == 2, hidden.shape
        assert hidden.shape[1] == head.num_in, (hidden.shape, head.num_in)
        assert hidden.dtype == head.dtype, (hidden.dtype, head.dtype)
        assert hidden.is_contiguous(), hidden.stride()
        logits = torch.empty(len(hidden), head.num_out)
        with self._lock:
            self._functions.tandem_decoder_head(self._handle, address(hidden), count(len(hidden)), address(logits))
        return logits

    def _check(
        self,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        block_tables: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        shape, num_tokens = self.shape, len(token_ids)
        num_layers = len(self.weights.layers)
        assert pages.shape[1:4] == (num_layers, 2, shape.num_kv_heads), pages.shape
        assert pages.shape[5] == shape.head_dim, pages.shape
        assert pages.dtype == self.weights.head.dtype, pages.dtype
        assert token_ids.shape == slots.shape == (num_tokens,), (token_ids.shape, slots.shape)
        assert cos.shape == sin.shape == (num_tokens, shape.head_dim // 2), (cos.shape, sin.shape)
        assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
        assert wanted.ndim == 1, wanted.shape
        assert block_tables.ndim == 2, block_tables.shape
        integers = (token_ids, slots, wanted, block_tables)
        assert all(tensor.dtype == torch.int64 for tensor in integers), [tensor.dtype for tensor in integers]
        assert all(tensor.is_contiguous() for tensor in (*integers, cos, sin, pages))


def _delete(functions: ctypes.CDLL, handle: int, _kept: object) -> None:
    """Called when the decoder is gone; what its threads read is kept until then."""
    functions.tandem_decoder_delete(handle)


@functools.cache
def _declared(library: Library) -> ctypes.CDLL:
    functions, pointer, number = library.functions, ctypes.c_void_p, ctypes.c_int32
    structure, numbers = ctypes.POINTER(DecoderStructure), ctypes.POINTER(number)
    functions.tandem_decoder_new.argtypes = [number, structure, number, numbers, number, pointer]
    functions.tandem_decoder_new.restype = pointer
    functions.tandem_decoder_delete.argtypes = [pointer]
    functions.tandem_decoder_delete.restype = None
    functions.tandem_decoder_forward.argtypes = [pointer, ctypes.POINTER(BatchStructure)]
    functions.tandem_decoder_forward.restype = number
    functions.tandem_decoder_head.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
    functions.tandem_decoder_head.restype = None
    return functions
