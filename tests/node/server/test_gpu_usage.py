"""The load of a node's GPU as NVML reads it, by a fake NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton_node.server.gpu_usage import GpuUsage, card_of, gpu_reader


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML of a machine with two cards, as the package names its functions."""

    NVMLError = NVMLError

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver

    def nvmlInit(self) -> None:
        self._need_driver()

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._need_driver()
        return SimpleNamespace(used=100 + handle, total=1000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=50 + handle)

    def _need_driver(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize(
    ("device", "visible", "card"),
    [
        ("cuda", "", "0"),
        ("cuda:1", "", "1"),
        ("cuda", "3,1", "3"),
        ("cuda:1", "3, 1", "1"),
        ("cuda:1", "GPU-a,GPU-b", "GPU-b"),
        ("cuda:2", "0", "2"),
    ],
)
def test_the_card_is_the_one_that_cuda_shows(device: str, visible: str, card: str) -> None:
    assert card_of(device, visible) == card


@pytest.mark.parametrize(
    ("device", "visible", "usage"),
    [("cuda", "", GpuUsage(0.5, 100, 1000)), ("cuda:1", "GPU-a,GPU-b", GpuUsage(0.51, 101, 1000))],
)
def test_a_reader_gives_the_share_of_busy_time_and_the_memory_in_use(
    device: str, visible: str, usage: GpuUsage
) -> None:
    nvml = FakeNvml()
    variables = {"CUDA_VISIBLE_DEVICES": visible}
    read = gpu_reader(device, load=lambda name: nvml, variables=variables)
    assert read is not None
    assert read() == usage
    nvml.driver = False
    assert read() is None


def test_without_a_card_or_its_library_or_driver_there_is_no_reader() -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    nvml = FakeNvml(driver=False)
    assert gpu_reader("cpu", load=missing) is None
    assert gpu_reader("cuda", load=missing) is None
    assert gpu_reader("cuda", load=lambda name: nvml) is None
    assert gpu_reader("cuda:7", load=lambda name: FakeNvml(), variables={}) is None
