"""Device names on the command line: cpu, cuda (the first GPU) or cuda:N."""

from __future__ import annotations

from baton_engine.config.engine_config import DEVICE_CHOICES, is_device

CUDA = "cuda"
DEVICE_METAVAR = "|".join(DEVICE_CHOICES)


def parse_device(text: str) -> str:
    """Return `text` if it is a valid device name, else raise ValueError. Does not check that the
    device exists."""
    if not is_device(text):
        raise ValueError(f"{text!r} is not a device; write cpu, cuda or cuda:N")
    return text


def cuda_index(device: str) -> int | None:
    """N of cuda:N, None for a device without a number."""
    number = device.partition(":")[2]
    return int(number) if number else None
