"""The load of a node's GPU, for its metrics page.

In: the name of the device. Out: the share of time in which kernels ran, and the memory in use, by
all processes on the card. NVML's package (pip install nvidia-ml-py) reads them; without it, on
another device, or if the driver fails, there are none.

CUDA numbers the cards that CUDA_VISIBLE_DEVICES lists, NVML all of the machine, in the order of
their slots.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from baton_engine.config.engine_config import on_cuda

logger = logging.getLogger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuUsage(NamedTuple):
    """`busy` is a share; memory is in bytes."""

    busy: float
    used: int
    total: int


ReadGpu = Callable[[], GpuUsage | None]


def gpu_reader(
    device: str,
    *,
    load: Callable[[str], Any] = import_module,
    variables: Mapping[str, str] = os.environ,
) -> ReadGpu | None:
    """What reads the card's load now; None if it cannot be read. `load` imports a module."""
    if not on_cuda(device):
        return None
    try:
        nvml = load("pynvml")
    except ImportError:
        logger.info("no metrics of the GPU: they need NVML's package; pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
        handle = _find(nvml, card_of(device, variables.get(VISIBLE, "")))
    except nvml.NVMLError as error:
        logger.warning("no metrics of the GPU: NVML fails: %s", error)
        return None

    def read() -> GpuUsage | None:
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except nvml.NVMLError:
            return None
        return GpuUsage(busy / 100, memory.used, memory.total)

    return read


def card_of(device: str, visible: str) -> str:
    """The number or the UUID of the card in NVML's terms."""
    number = int(device.partition(":")[2] or 0)
    listed = [each.strip() for each in visible.split(",") if each.strip()]
    return listed[number] if number < len(listed) else str(number)


def _find(nvml: Any, card: str) -> Any:
    if card.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(card))
    return nvml.nvmlDeviceGetHandleByUUID(card)
