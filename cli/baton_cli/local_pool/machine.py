"""The machine's cores, divided among engines, and the dtype in which it computes fast.

In: /proc, cgroup and the model's config. Out: a thread count per engine, and one dtype for all
engines of the pool: engines of different dtypes cannot exchange KV.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton_engine.config.engine_config import on_cuda
from baton_protocol.policies import DType

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CPU_FLAG_KEYS = ("flags", "Features")  # on x86, on ARM
# Without these, bf16 is emulated: 2-4 times slower than float32.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

logger = logging.getLogger(__name__)


def cores() -> int:
    """Cores that this process may use: the smaller of its affinity and the container's CPU quota,
    rounded up."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return allowed
    if quota == "max":
        return allowed
    return max(1, min(allowed, -(-int(quota) // int(period))))


def share_cores(available: int, engines: int) -> list[int]:
    """Return each engine's thread count, at least one. Leftover cores go to the first engines:
    prefill nodes come first, and prefill is bound by compute, decode by memory bandwidth.

    Engines do not share cores as long as there is one for each: the threads of a step spin while
    they wait for each other. Two engines with two threads each on two cores generated 4-7 tokens/s,
    with one thread each 23-26 (`baton up --once` on the demo model, on a machine with other work).
    """
    cores, extra = divmod(available, engines)
    return [max(1, cores + (index < extra)) for index in range(engines)]


def cpu_flags() -> frozenset[str]:
    """The first core's feature flags; empty where the kernel lists none."""
    try:
        return flags_in(CPUINFO.read_text())
    except OSError:
        return frozenset()


def flags_in(cpuinfo: str) -> frozenset[str]:
    """The first core's feature flags in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, values = line.partition(":")
        if key.strip() in CPU_FLAG_KEYS:
            return frozenset(values.split())
    return frozenset()


def decide_dtype(
    requested: DType, device: str, config: Mapping[str, Any], flags: frozenset[str]
) -> DType:
    """Resolve `auto` to a dtype. transformers 4 names the config's key torch_dtype, 5 dtype."""
    if requested != "auto":
        return requested
    saved = config.get("dtype") or config.get("torch_dtype")
    chosen: DType = "float32"
    if saved == "float32":
        why = "as the checkpoint has"
    elif on_cuda(device) or flags & BF16_FLAGS:
        chosen, why = "bfloat16", "in which the device computes"
    else:
        why = "since this CPU does not compute in bfloat16"
    logger.info("--dtype auto: %s, %s", chosen, why)
    return chosen
