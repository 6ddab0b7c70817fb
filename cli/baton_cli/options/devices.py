"""Where an engine computes, as people write it: cpu, cuda (the first GPU) or cuda:N."""

from __future__ import annotations

import re
from typing import NewType

Device = NewType("Device", str)

CPU, CUDA = Device("cpu"), Device("cuda")
DEVICE_METAVAR = "cpu|cuda|cuda:N"
_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)


def parse_device(text: str) -> Device:
    """Raise ValueError for what names no device; whether there is one is found out later."""
    if not _DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is no device; write cpu, cuda or cuda:N")
    return Device(text)


def on_cuda(device: Device) -> bool:
    return device != CPU


def cuda_index(device: Device) -> int | None:
    """N of cuda:N; None where no certain GPU was asked for."""
    number = device.partition(":")[2]
    return int(number) if number else None
