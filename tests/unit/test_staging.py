"""Pages move between the model's memory and the peers' memory, and no other page does."""

import torch

from common.messages.ids import BlockId
from common.runtime.staging import HostStaging


def make_pages(value: float) -> torch.Tensor:
    return torch.full((5, 2, 3), value)


def test_published_pages_reach_the_host_alone() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).publish([BlockId(1), BlockId(4)])
    assert host[:, 0, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert bool((device == 1.0).all())


def test_collected_pages_reach_the_device_alone() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).collect([BlockId(0)])
    assert device[:, 0, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert bool((host == 0.0).all())


def test_no_pages_is_no_work() -> None:
    device, host = make_pages(1.0), make_pages(0.0)
    HostStaging(device, host).publish([])
    assert bool((host == 0.0).all())
