"""Weights of a linear in the order in which native kernels read them (lines.h)."""

from dataclasses import dataclass

import torch

PANEL = 16
"""Columns that lie side by side."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`packed` is [num_panels, ceil(num_in / depth), 16, depth] contiguous; depth is 2 for bfloat16, 1 for float32.

    Panels hold 16 outputs each. If `is_gated` they alternate between 16 gates and the 16 numbers they gate, and
    `num_out` counts the products. `bias` [num_panels * 16] fp32 is in the order of the panels' columns. Padding is 0.
    """

    packed: torch.Tensor
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    is_gated: bool

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.packed.dtype


def packed_shape(num_out: int, num_in: int, dtype: torch.dtype, *, is_gated: bool = False) -> tuple[int, int, int, int]:
    """Return the shape of `PackedLinear.packed`; `num_out` counts products if gated."""
    depth = _depth(dtype)
    return -(-num_out // PANEL) * (2 if is_gated else 1), -(-num_in // depth), PANEL, depth


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
) -> PackedLinear:
    """Pack `weight` [out_features, in_features], and `bias` [out_features], into `out` or new memory.

    If gated, the first half of out_features are gates, the other half is what they gate. `out` is contiguous, 64-byte
    aligned and of `packed_shape`.
    """
    rows, num_in = weight.shape
    num_out = rows // 2 if is_gated else rows
    assert not is_gated or rows % 2 == 0, rows
    shape = packed_shape(num_out, num_in, weight.dtype, is_gated=is_gated)
    packed = torch.empty(shape, dtype=weight.dtype) if out is None else out
    assert packed.shape == shape, (packed.shape, shape)
    assert packed.dtype == weight.dtype, (packed.dtype, weight.dtype)
    assert packed.is_contiguous()
    assert packed.data_ptr() % 64 == 0
    for part, columns in enumerate(weight.chunk(2) if is_gated else (weight,)):
        _pack(columns, packed[part :: 2 if is_gated else 1])
    return PackedLinear(packed, _packed_bias(bias, is_gated), num_out, num_in, is_gated)


def unpack_linear(linear: PackedLinear) -> torch.Tensor:
    """Return the weight [out_features, in_features] that was packed."""
    parts = [linear.packed[part::2] for part in range(2)] if linear.is_gated else [linear.packed]
    columns = [part.transpose(1, 2).reshape(part.shape[0] * PANEL, -1) for part in parts]
    return torch.cat([part[: linear.num_out, : linear.num_in] for part in columns])


def _pack(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Write `weight` [num_out, num_in] to `panels` [n, num_lines, 16, depth]."""
    num_panels, num_lines, _, depth = panels.shape
    missing = (num_panels * PANEL - weight.shape[0], num_lines * depth - weight.shape[1])
    if any(missing):
        weight = torch.nn.functional.pad(weight, (0, missing[1], 0, missing[0]))
    lines = weight.reshape(num_panels, PANEL, num_lines, depth)
    if depth == 2:  # a pair is moved as one number, which is several times as fast
        panels.view(torch.int32).copy_(lines.contiguous().view(torch.int32).transpose(1, 2))
    else:
        panels.copy_(lines.transpose(1, 2))


def _packed_bias(bias: torch.Tensor | None, is_gated: bool) -> torch.Tensor | None:
    if bias is None:
        return None
    parts = [
        torch.nn.functional.pad(part.float(), (0, -len(part) % PANEL)).view(-1, PANEL)
        for part in (bias.chunk(2) if is_gated else (bias,))
    ]
    return torch.stack(parts, dim=1).flatten().contiguous()


def _depth(dtype: torch.dtype) -> int:
    assert dtype in (torch.float32, torch.bfloat16), dtype
    return 2 if dtype == torch.bfloat16 else 1
