"""Assigns each engine of a pool a GPU, and a part of its memory for KV.

In: nvidia-smi's output (torch would be slow to load), the environment's variables of CUDA,
--device, the number of engines and each one's memory demand. Out: a Share per engine. Without it,
engines that start together on one GPU would each count all of its memory as free.

An engine gets its GPU by UUID. nvidia-smi numbers GPUs by PCI bus, but CUDA puts the fastest first
unless CUDA_DEVICE_ORDER=PCI_BUS_ID, so the same number can mean two GPUs where they are unlike.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_cli.errors import CommandError
from baton_cli.options.devices import cuda_index
from baton_cli.options.sizes import about_size

ASKED = "index,uuid,memory.free,memory.total,mig.mode.current,name"
QUERY = ("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 20.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, PCI_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
UUID_PREFIXES = ("GPU-", "MIG-")
MPS_PIPES, DEFAULT_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
# GPU memory of each process's CUDA context.
CONTEXT_BYTES = 1 << 30
LEAST_KV_BYTES = 64 << 20


@dataclass(frozen=True)
class Memory:
    """A GPU's memory in bytes."""

    free: int
    total: int

    def usable(self, share: float) -> int:
        """Bytes that may still be allocated before `share` of the memory is in use."""
        return max(0, int(self.total * share) - (self.total - self.free))


@dataclass(frozen=True)
class Gpu:
    """`name` is an entry for CUDA_VISIBLE_DEVICES: the UUID, or what the user wrote there. `memory`
    is None if it is unknown, as of a GPU in MIG mode."""

    name: str
    memory: Memory | None


@dataclass(frozen=True)
class Share:
    """One engine's GPU and KV bytes. `kv_memory` None: the engine sizes its KV cache itself."""

    gpu: str
    kv_memory: int | None


def list_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES in its order if it is set,
    else all in nvidia-smi's order. Raise CommandError if nvidia-smi fails or there is none."""
    try:
        done = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"--device cuda: nvidia-smi does not answer: {error}") from error
    listed, models = _parse(done.stdout)
    visible = environment.get(VISIBLE)
    if visible is None:
        gpus = list(listed.values())
    else:
        same_order = environment.get(ORDER) == PCI_ORDER or len(models) == 1
        gpus = _visible_gpus(visible, listed, same_order)
    if not gpus:
        limits = f" ({VISIBLE}={visible})" if visible is not None else ""
        raise CommandError(f"--device cuda: this process may use no GPU{limits}")
    return gpus


def _parse(listing: str) -> tuple[dict[str, Gpu], set[str]]:
    """GPUs by nvidia-smi's index, and their models. Lines that describe no GPU are left out:
    nvidia-smi mixes messages about broken GPUs with its output."""
    gpus, models = {}, set()
    for line in listing.splitlines():
        parts = [part.strip() for part in line.split(",", 5)]
        if len(parts) != 6 or not parts[1].startswith(UUID_PREFIXES):
            continue
        index, uuid, free_mib, total_mib, mig, model = parts
        memory = None
        # For what it cannot tell, nvidia-smi prints [N/A] or [Insufficient Permissions]. An engine
        # on a GPU in MIG mode gets one of its instances, not the memory of all.
        if mig != "Enabled" and free_mib.isdecimal() and total_mib.isdecimal():
            memory = Memory(int(free_mib) << 20, int(total_mib) << 20)
        gpus[index] = Gpu(uuid, memory)
        models.add(model)
    return gpus, models


def _visible_gpus(visible: str, listed: Mapping[str, Gpu], same_order: bool) -> list[Gpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES. Like CUDA, ignore everything from the first entry on that
    names no GPU. `same_order`: CUDA numbers the GPUs as nvidia-smi does; otherwise a number stays
    as it is, because only CUDA knows which GPU it means."""
    gpus = []
    for entry in (part.strip() for part in visible.split(",")):
        matches = [gpu for gpu in listed.values() if gpu.name.startswith(entry)]
        if entry in listed:
            gpus.append(listed[entry] if same_order else Gpu(entry, None))
        elif not entry.startswith(UUID_PREFIXES):
            break
        elif len(matches) == 1:
            gpus.append(matches[0])
        else:
            gpus.append(Gpu(entry, None))
    return gpus


def choose_gpus(gpus: Sequence[Gpu], device: str) -> list[Gpu]:
    """Return all GPUs for cuda, or the one at index N for cuda:N; raise CommandError."""
    index = cuda_index(device)
    if index is None:
        return list(gpus)
    if index >= len(gpus):
        names = ", ".join(f"cuda:{index}" for index in range(len(gpus)))
        raise CommandError(
            f"--device {device}: the GPU does not exist; use cuda, or one of {names}"
        )
    return [gpus[index]]


def share_gpus(gpus: Sequence[Gpu], engines: int, needed: int, share: float) -> list[Share]:
    """Assign engines to GPUs round-robin; engines on one GPU divide its usable memory evenly.
    `needed` is each engine's bytes besides KV. Raise CommandError if too little is left for KV, or
    if the memory of a shared GPU is unknown."""
    shares = []
    for engine in range(engines):
        gpu = gpus[engine % len(gpus)]
        beside = len(range(engine % len(gpus), engines, len(gpus)))
        kv_memory = None
        if beside > 1:
            kv_memory = _kv_share(gpu, beside, needed + CONTEXT_BYTES, share)
        shares.append(Share(gpu.name, kv_memory))
    return shares


def _kv_share(gpu: Gpu, engines: int, needed: int, share: float) -> int:
    """KV bytes of each of several engines on this GPU; `needed` are its other bytes."""
    if gpu.memory is None:
        raise CommandError(
            f"the memory of the GPU {gpu.name} is unknown, so {engines} engines cannot share it; "
            f"start one node per GPU, or name GPUs in {VISIBLE} by the UUIDs that nvidia-smi -L "
            "lists, or give --kv-memory"
        )
    usable = gpu.memory.usable(share)
    kv_bytes = usable // engines - needed
    if kv_bytes < LEAST_KV_BYTES:
        raise CommandError(
            f"the GPU {gpu.name} has {about_size(usable)} of usable memory, too little for "
            f"{engines} engines that need {about_size(needed)} each besides their KV; start fewer "
            "nodes, or raise --gpu-memory-utilization, or give --kv-memory"
        )
    return kv_bytes


def time_slicing(names: Sequence[str], environment: Mapping[str, str]) -> str:
    """A line about engines that take turns on one GPU, "" if none do. `names` has each engine's
    GPU. Without CUDA's MPS, kernels of two processes never run at the same time on a GPU."""
    if (Path(environment.get(MPS_PIPES) or DEFAULT_MPS_PIPES) / "control").exists():
        return ""
    shared = [f"{count} nodes on {name}" for name, count in Counter(names).items() if count > 1]
    if not shared:
        return ""
    return (
        f"{', '.join(shared)}: without CUDA's MPS, nodes on one GPU take turns, and tokens come at "
        "irregular intervals while another node computes a prompt; before baton up, run "
        "nvidia-cuda-mps-control -d, or start one node per GPU"
    )
