"""What a user may set about the torch engine; imports no torch, so that flags can be checked first.

In: flags. Out: TorchSettings, whose defaults are filled in by `torch_plan.make_plan`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_engine.errors import SettingsError

# In bf16 on a CPU a prompt's scores are computed some at a time, 4 MB: more leave the cache between
# two passes over them. Each is there as two products, in float32 twice, and as a weight.
SCORES_AT_ONCE = 1 << 20

DTYPE_CHOICES = ("auto", "float32", "bfloat16")
DEVICE_CHOICES = ("cpu", "cuda", "cuda:N")
DEVICES = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)
OVERLAP_CHOICES = ("auto", "on", "off")
KERNEL_CHOICES = ("auto", "torch", "triton")
LOAD_CHOICES = ("auto", "dummy")
CHOICES = {
    "dtype": DTYPE_CHOICES,
    "load_format": LOAD_CHOICES,
    "kernels": KERNEL_CHOICES,
    "overlap": OVERLAP_CHOICES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """None means: decided from the model and the machine (see `runner.plan`). Memory in bytes."""

    model: Path
    name: str = ""  # as reported in EngineInfo; "" is the folder's last component
    dtype: str = "auto"
    device: str = "cpu"
    gpu_memory_utilization: float = 0.9  # of the card's memory, whoever holds it
    kv_memory: int | None = None
    kv_blocks: int | None = None
    host_kv_memory: int = 0  # for blocks that the cache evicts
    chunk_blocks: int | None = None
    kv_shards: int = 1  # stored values per chunk, each of its own KV heads
    block_size: int = 16
    max_batched_tokens: int | None = None
    max_num_seqs: int = 256
    max_model_len: int | None = None
    threads: int | None = None
    kernels: str = "auto"  # triton on cuda, torch on cpu
    enforce_eager: bool = False  # no CUDA graphs
    overlap: str = "auto"  # a step launched before the one before it is read: on cuda
    overcommit: bool = False  # believe given sizes that this machine's memory cannot hold
    verify_weights: bool = False  # hash them again, whatever the digest cache says
    load_format: str = "auto"  # "dummy": random weights, from config.json alone

    def check(self) -> None:
        """Raise SettingsError naming the flag and the value."""
        for flag, choices in CHOICES.items():
            value = getattr(self, flag)
            if value not in choices:
                raise _unknown(flag, value, choices)
        if not DEVICES.fullmatch(self.device):
            raise _unknown("device", self.device, DEVICE_CHOICES)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingsError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}; it is a share of "
                "the card's memory, above 0 and at most 1"
            )
        if self.kv_memory is not None and self.kv_blocks is not None:
            raise SettingsError(
                f"--kv-memory {self.kv_memory} and --kv-blocks {self.kv_blocks} exclude each other"
            )
        if self.host_kv_memory < 0:
            raise SettingsError(
                f"--host-kv-memory is {self.host_kv_memory}; it must be at least 0 (no host tier)"
            )
        for flag in (
            "kv_memory",
            "kv_blocks",
            "chunk_blocks",
            "kv_shards",
            "block_size",
            "max_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "threads",
        ):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise SettingsError(f"{_option(flag)} is {value}; it must be at least 1")


def _unknown(flag: str, value: str, choices: Sequence[str]) -> SettingsError:
    return SettingsError(f"{_option(flag)} {value} is unknown; use {', '.join(choices)}")


def _option(flag: str) -> str:
    return "--" + flag.replace("_", "-")
