"""What holds for every test: no model hub is asked, and GPU tests are skipped where there is no GPU."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def _has_gpu() -> bool:
    import torch  # only when a GPU test was collected: it takes seconds

    return torch.cuda.is_available()
