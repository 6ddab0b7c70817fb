"""Assigns each engine of a pool a GPU, and a part of its memory for KV.

In: nvidia-smi's output (torch would be slow to load), CUDA_VISIBLE_DEVICES, --device, the number of
engines and each one's memory demand. Out: a Share per engine. Without it, engines that start
together on one GPU would each count all of its memory as free.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from baton_cli.errors import CommandError
from baton_cli.options.devices import cuda_index
from baton_cli.options.sizes import about_size

ASKED = "index,uuid,memory.free,memory.total"
QUERY = ("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
# GPU memory of each process's CUDA context.
CONTEXT_BYTES = 1 << 30
LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Gpu:
    """`name` is an index or UUID that CUDA_VISIBLE_DEVICES accepts; memory is in bytes."""

    name: str
    free: int
    total: int

    def usable(self, share: float) -> int:
        """Bytes that may still be allocated before `share` of the memory is in use."""
        return max(0, int(self.total * share) - (self.total - self.free))


@dataclass(frozen=True)
class Share:
    """One engine's GPU and KV bytes. `kv_memory` None: the engine sizes its KV cache itself."""

    gpu: str
    kv_memory: int | None


def list_gpus(visible: str | None) -> list[Gpu]:
    """The GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES (`visible`) if it
    is set. Raise CommandError if nvidia-smi fails or lists none of them."""
    try:
        done = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"--device cuda: nvidia-smi does not answer: {error}") from error
    return parse_gpus(done.stdout, visible)


def parse_gpus(listing: str, visible: str | None) -> list[Gpu]:
    by_name: dict[str, Gpu] = {}
    order = []
    for line in listing.splitlines():
        index, uuid, free_mib, total_mib = (part.strip() for part in line.split(","))
        free, total = int(free_mib) << 20, int(total_mib) << 20
        by_name[index], by_name[uuid] = Gpu(index, free, total), Gpu(uuid, free, total)
        order.append(by_name[index])
    if visible is not None:
        order = [by_name[name] for name in visible.split(",") if name in by_name]
    if not order:
        raise CommandError("--device cuda: this process may use no GPU")
    return order


def choose_gpus(gpus: Sequence[Gpu], device: str) -> list[Gpu]:
    """Return all GPUs for cuda, or the one at index N for cuda:N; raise CommandError."""
    index = cuda_index(device)
    if index is None:
        return list(gpus)
    if index >= len(gpus):
        found = ", ".join(f"cuda:{each}" for each in range(len(gpus)))
        raise CommandError(
            f"--device {device}: the GPU does not exist; use cuda, or one of {found}"
        )
    return [gpus[index]]


def share_gpus(gpus: Sequence[Gpu], engines: int, needed: int, share: float) -> list[Share]:
    """Assign engines to GPUs round-robin; engines on one GPU divide its usable memory evenly.
    `needed` is each engine's bytes besides KV. Raise CommandError if too little is left for KV."""
    shares = []
    for engine in range(engines):
        gpu = gpus[engine % len(gpus)]
        beside = len(range(engine % len(gpus), engines, len(gpus)))
        if beside == 1:
            shares.append(Share(gpu.name, None))
            continue
        kv_bytes = gpu.usable(share) // beside - needed - CONTEXT_BYTES
        if kv_bytes < LEAST_KV_BYTES:
            raise CommandError(
                f"GPU {gpu.name} has {about_size(gpu.usable(share))} of usable memory, too "
                f"little for {beside} engines that need {about_size(needed + CONTEXT_BYTES)} "
                "each besides their KV; start fewer nodes, or raise --gpu-memory-utilization, "
                "or give --kv-memory"
            )
        shares.append(Share(gpu.name, kv_bytes))
    return shares
