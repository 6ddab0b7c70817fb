"""Which GPU each engine of a pool gets, and how much of its memory for KV.

In: what nvidia-smi says (asking torch would load it), CUDA_VISIBLE_DEVICES, --device, the number of
engines and what each takes. Out: a Share per engine. Engines that start together on one GPU would
each see all of it as free.
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
# CUDA's context, per process.
CONTEXT_BYTES = 1 << 30
LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Gpu:
    """`name` is an index or a UUID, as CUDA_VISIBLE_DEVICES takes them; memory in bytes."""

    name: str
    free: int
    total: int

    def usable(self, share: float) -> int:
        """What may be taken so that no more than this share of it is in use."""
        return max(0, int(self.total * share) - (self.total - self.free))


@dataclass(frozen=True)
class Share:
    """One engine's GPU. `kv_memory` None: it has the GPU to itself and decides alone."""

    gpu: str
    kv_memory: int | None


def list_gpus(visible: str | None) -> list[Gpu]:
    """The GPUs this process may use, in CUDA_VISIBLE_DEVICES' order where it is set."""
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
        raise CommandError("--device cuda: there is no GPU that this process may use")
    return order


def choose_gpus(gpus: Sequence[Gpu], device: str) -> list[Gpu]:
    """All of them for cuda, the Nth for cuda:N."""
    index = cuda_index(device)
    if index is None:
        return list(gpus)
    if index >= len(gpus):
        found = ", ".join(f"cuda:{each}" for each in range(len(gpus)))
        raise CommandError(f"--device {device}: there is no such GPU; use cuda, or one of {found}")
    return [gpus[index]]


def share_gpus(gpus: Sequence[Gpu], engines: int, needed: int, share: float) -> list[Share]:
    """Engines in turn; those on one GPU divide what may be used of it alike. Each needs so many
    bytes beside its KV."""
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
                f"GPU {gpu.name} has {about_size(gpu.usable(share))} to use, too little for"
                f" {beside} engines that take {about_size(needed + CONTEXT_BYTES)} each beside"
                " their KV; start fewer nodes, or raise --gpu-memory-utilization, or give"
                " --kv-memory"
            )
        shares.append(Share(gpu.name, kv_bytes))
    return shares
