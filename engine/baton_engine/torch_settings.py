"""What a user may set about the torch engine; imports no torch, so that flags can be checked first.

In: flags. Out: TorchSettings, whose defaults are filled in by `torch_engine.build_torch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton_engine.errors import SettingsError

DTYPE_CHOICES = ("auto", "float32", "bfloat16")
DEVICE_CHOICES = ("cpu", "cuda")
KERNEL_CHOICES = ("auto", "torch", "triton")
LOAD_CHOICES = ("auto", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """None means: decided from the model and the machine (see `torch_engine`). Memory in bytes."""

    model: Path
    name: str = ""  # as reported in EngineInfo; "" is the folder's last component
    dtype: str = "auto"
    device: str = "cpu"
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
    load_format: str = "auto"  # "dummy": random weights, from config.json alone

    def check(self) -> None:
        """Raise SettingsError naming the flag and the value."""
        if self.dtype not in DTYPE_CHOICES:
            raise SettingsError(f"--dtype {self.dtype} is unknown; use {', '.join(DTYPE_CHOICES)}")
        if self.load_format not in LOAD_CHOICES:
            raise SettingsError(
                f"--load-format {self.load_format} is unknown; use {', '.join(LOAD_CHOICES)}"
            )
        if self.kernels not in KERNEL_CHOICES:
            raise SettingsError(
                f"--kernels {self.kernels} is unknown; use {', '.join(KERNEL_CHOICES)}"
            )
        kind = self.device.partition(":")[0]
        if kind not in DEVICE_CHOICES:
            raise SettingsError(
                f"--device {self.device} is unknown; use {', '.join(DEVICE_CHOICES)}"
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
                raise SettingsError(f"--{flag.replace('_', '-')} is {value}; it must be at least 1")
