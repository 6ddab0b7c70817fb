"""Which GPU each engine of a pool gets, and how much of its memory for KV.

In: what nvidia-smi says (asking torch would load it), CUDA_VISIBLE_DEVICES, the number of engines.
Out: a Share per engine. Engines that start together on one GPU would each see all of it as free.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import CommandError
from baton.sizes import ByteSize

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
# Of what is free, as one engine alone takes it; the rest is for activations and fragments.
USED_SHARE = 0.85
# CUDA's context and the libraries' workspaces, per process.
CONTEXT_BYTES = 1 << 30
LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Gpu:
    """`name` is an index or a UUID, as CUDA_VISIBLE_DEVICES takes them."""

    name: str
    free: int


@dataclass(frozen=True)
class Share:
    """One engine's GPU. `kv_memory` None: it has the GPU to itself and decides alone."""

    gpu: str
    kv_memory: ByteSize | None


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
        index, uuid, free_mib = (part.strip() for part in line.split(","))
        free = int(free_mib) << 20
        by_name[index], by_name[uuid] = Gpu(index, free), Gpu(uuid, free)
        order.append(by_name[index])
    if visible is not None:
        order = [by_name[name] for name in visible.split(",") if name in by_name]
    if not order:
        raise CommandError("--device cuda: there is no GPU that this process may use")
    return order


def share_gpus(gpus: Sequence[Gpu], engines: int, weight_bytes: int) -> list[Share]:
    """Engines in turn; those on one GPU share its free memory alike."""
    shares = []
    for engine in range(engines):
        gpu = gpus[engine % len(gpus)]
        beside = len(range(engine % len(gpus), engines, len(gpus)))
        if beside == 1:
            shares.append(Share(gpu.name, None))
            continue
        kv_bytes = int(gpu.free * USED_SHARE) // beside - weight_bytes - CONTEXT_BYTES
        if kv_bytes < LEAST_KV_BYTES:
            raise CommandError(
                f"GPU {gpu.name} has {gpu.free >> 20} MiB free, too little for {beside} engines"
                f" with {weight_bytes >> 20} MiB of weights each; start fewer nodes,"
                " or give --kv-memory"
            )
        shares.append(Share(gpu.name, ByteSize(kv_bytes)))
    return shares
