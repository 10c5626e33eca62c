"""Where the pages that peers can reach are not the pages that the model computes in: moves them between the two.

Peers reach host memory. On the CPU the model computes there as well and nothing moves; on a GPU, pages are copied out
before they are announced and copied in before they are decoded from. Owned by the engine thread.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from common.messages.ids import BlockId


class Staging(Protocol):
    """Copies whole pages; returns when they are complete."""

    def publish(self, block_ids: Sequence[BlockId]) -> None:
        """Make what the model wrote visible to peers."""

    def collect(self, block_ids: Sequence[BlockId]) -> None:
        """Make what was received from peers visible to the model."""


class NoStaging:
    """The model computes in the memory that peers reach."""

    def publish(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to do."""

    def collect(self, block_ids: Sequence[BlockId]) -> None:
        """Nothing to do."""


class HostStaging:
    """`device_pages` and `host_pages` have the same shape, [num_blocks, ...]."""

    def __init__(self, device_pages: torch.Tensor, host_pages: torch.Tensor) -> None:
        assert device_pages.shape == host_pages.shape, (device_pages.shape, host_pages.shape)
        self._device_pages = device_pages
        self._host_pages = host_pages

    def publish(self, block_ids: Sequence[BlockId]) -> None:
        """Copy pages from the device to the host."""
        _copy(self._device_pages, self._host_pages, block_ids)

    def collect(self, block_ids: Sequence[BlockId]) -> None:
        """Copy pages from the host to the device."""
        _copy(self._host_pages, self._device_pages, block_ids)


def _copy(source: torch.Tensor, target: torch.Tensor, block_ids: Sequence[BlockId]) -> None:
    if not block_ids:
        return
    index = torch.tensor(block_ids)
    pages = source[index.to(source.device)].to(target.device)
    target.index_copy_(0, index.to(target.device), pages)
