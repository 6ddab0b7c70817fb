"""The decisions about a torch engine that are made before its weights are read.

In: settings, the model's config, the device and its free memory. Out: an EnginePlan, or a one-line
error about the model folder, the architecture, the device or too little memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from baton_engine.attention.selector import Kernels, choose_kernels
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.head_config import HeadConfig, read_head
from baton_engine.config.model_config import ModelConfig, Pooled, compute_dtype, why_auto
from baton_engine.config.speculative import SpeculativeConfig
from baton_engine.errors import SettingsError
from baton_engine.kv.host_blocks import slots_for
from baton_engine.memory.demand import (
    DraftModelDemand,
    HeadDemand,
    Measured,
    MemoryBudget,
    MemoryDemand,
)
from baton_engine.memory.fit import free_blocks
from baton_engine.memory.fit_check import check_fit, pool_text
from baton_engine.memory.head_bytes import head_demand
from baton_engine.memory.host_memory import check_asked, free_memory
from baton_engine.memory.requirements import (
    CPU_KV_BYTES,
    CPU_SHARE,
    demand_of,
    kv_cache_dtype,
    layout_of,
)
from baton_engine.models.heads.build import OWN_EMBEDDING
from baton_engine.runner.planned_draft_model import PlannedDraftModel, plan_draft_model
from baton_engine.scheduling.scheduler_class import scheduler_class
from baton_engine.weights.checkpoint import weight_files
from baton_engine.weights.head_files import head_names
from baton_protocol.layout import KVLayout

# What a text's vector is, by ModelConfig.pooled.
POOLED: Mapping[Pooled, str] = {
    "last": "the state of its last token",
    "cls": "the state of its first token (CLS)",
    "mean": "the mean of its tokens' states",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedHead:
    """A head that drafts tokens, the names of its tensors (None for random weights), and the most
    drafts of a sequence."""

    config: HeadConfig
    names: frozenset[str] | None
    drafts: int

    @property
    def own_embedding(self) -> bool:
        """Whether it does not share the target's."""
        return self.config.method == "eagle3" and OWN_EMBEDDING in (self.names or ())


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The decided sizes, device and kernels of a torch engine.

    `room` is None, and memory is not checked, in two cases on a CPU: the free memory is unknown, or
    both --overcommit and the pool's size are given.
    """

    config: ModelConfig
    layout: KVLayout
    device: torch.device
    demand: MemoryDemand
    room: MemoryBudget | None
    num_blocks: int
    host_slots: int
    max_model_len: int
    threads: int
    kernels: Kernels
    overlap: bool
    exact: bool  # --batch-invariant
    draft_model: PlannedDraftModel | None = None  # drafts
    head: PlannedHead | None = None  # drafts

    @property
    def of_draft_model(self) -> EnginePlan | None:
        """The plan of the draft model alone. Its pool holds as many tokens as the target's."""
        demand = self.demand.of_draft_model
        if demand is None:
            return None
        return replace(
            self,
            config=demand.config,
            layout=demand.layout,
            demand=demand,
            num_blocks=self.demand.draft_model_blocks(self.num_blocks),
            host_slots=0,
            max_model_len=min(self.max_model_len, demand.config.max_positions),
            exact=self.exact and demand.config.bridge is None,
            draft_model=None,
        )

    def measured(self, bytes_measured: Measured) -> EnginePlan:
        """The plan with the memory measured after the weights were loaded. Raises SettingsError if
        the measured sizes exceed the estimate and no longer fit."""
        demand = replace(self.demand, measured=bytes_measured)
        num_blocks = _num_blocks(demand, self.room)
        max_model_len = _max_model_len(demand, num_blocks)
        return replace(self, demand=demand, num_blocks=num_blocks, max_model_len=max_model_len)

    def pool_text(self) -> str:
        """Explains the pool's size, for the log."""
        return pool_text(self.demand, self.room, self.num_blocks)


def make_plan(
    settings: TorchSettings, *, free: Callable[[], int | None] = free_memory
) -> EnginePlan:
    """Raises SettingsError or ModelError with a one-line message. `free` returns the free host
    memory in bytes, or None if it is unknown."""
    settings.check()
    scheduler_class(settings.scheduler_cls)
    config = read_config(
        *(settings.model, settings.model_impl, settings.quantization, settings.runner)
    )
    _check_pooling(settings, config)
    if settings.load_format != "dummy":
        weight_files(settings.model)
    cuda_devices = torch.cuda.device_count()
    device = find_device(settings.device, cuda_devices)
    if unused := unused_gpus(settings.device, cuda_devices):
        logger.warning("%s", unused)
    if settings.dtype == "auto":
        logger.info("--dtype auto: %s, %s", compute_dtype(config, "auto"), why_auto(config))
    layout = layout_of(settings, config)
    kept = kv_cache_dtype(settings, config)
    if kept != settings.kv_cache_dtype:
        why = "the checkpoint is made for it; its scales of K and V are not needed"
        logger.info("--kv-cache-dtype auto: %s, because %s", kept, why)
    host_slots = 0 if config.encodes else slots_for(settings.host_kv_memory, layout)
    kernels = choose_kernels(settings.kernels, device, compute_dtype(config, settings.dtype))
    room = _room(settings, device, free())
    card = room.total if room is not None and device.type == "cuda" else None
    demand = demand_of(settings, config, layout, kernels=kernels, card=card)
    head = plan_head(settings, config)
    if head is not None:
        demand = replace(demand, head=_head_demand(head, demand))
    second = plan_draft_model(settings, config, demand.dtype)
    if second is not None:
        draft_layout = layout_of(second.settings, second.config)
        demand = replace(
            demand, draft_model=DraftModelDemand(config=second.config, layout=draft_layout)
        )
    num_blocks = _num_blocks(demand, room)
    return EnginePlan(
        config=config,
        layout=layout,
        device=device,
        demand=demand,
        room=room,
        num_blocks=num_blocks,
        host_slots=host_slots,
        max_model_len=_max_model_len(demand, num_blocks),
        threads=settings.threads or len(os.sched_getaffinity(0)),
        kernels=kernels,
        overlap=settings.overlap == "on" or (settings.overlap == "auto" and device.type == "cuda"),
        exact=_exact(settings, config, device, kernels),
        draft_model=second,
        head=head,
    )


def _check_pooling(settings: TorchSettings, config: ModelConfig) -> None:
    if not config.pooling:
        return
    if settings.speculative_config is not None:
        raise SettingsError(
            "--speculative-config drafts tokens, and this is a pooling model, which generates none;"
            " leave it out, or use --runner generate"
        )
    logger.info(
        "--runner %s: the model answers with %s",
        settings.runner,
        f"the scores of {config.classes} classes"
        if config.classes
        else f"the vector of a text: {POOLED[config.pooled]}",
    )


def plan_head(settings: TorchSettings, config: ModelConfig) -> PlannedHead | None:
    """The head that --speculative-config names, if its method is one. Raises SettingsError or
    ModelError."""
    if settings.speculative_config is None:
        return None
    asked = SpeculativeConfig.parse(settings.speculative_config)
    if asked.head is None:
        return None
    drafts = asked.num_speculative_tokens
    head = read_head(asked.head, asked.model, config, settings.model, drafts)
    dummy = settings.load_format == "dummy"
    return PlannedHead(head, None if dummy else head_names(head), drafts)


def _head_demand(head: PlannedHead, demand: MemoryDemand) -> HeadDemand:
    return head_demand(
        head.config,
        demand.dtype,
        demand.layout.block_size,
        demand.kernels,
        drafts=head.drafts,
        own_embedding=head.own_embedding,
    )


def _exact(
    settings: TorchSettings, config: ModelConfig, device: torch.device, kernels: Kernels
) -> bool:
    """Whether to build an engine whose bits do not depend on the batch. With `auto`, on a CPU,
    where it costs almost nothing."""
    if config.bridge is not None and not (config.encodes and device.type == "cpu"):
        if settings.batch_invariant == "on":
            raise SettingsError(
                f"--batch-invariant on: {config.architecture} is computed by transformers' code,"
                " whose products depend on the batch or, of an encoder, are not tested on"
                f" {device.type}; use --batch-invariant auto"
            )
        return False
    if settings.batch_invariant == "auto":
        exact = device.type == "cpu" and kernels == "torch"
        why = "it costs almost nothing on a CPU" if exact else "its cost is not measured"
        logger.info("--batch-invariant auto: %s, because %s", "on" if exact else "off", why)
        return exact
    if settings.batch_invariant == "off":
        return False
    if device.type != "cpu" and kernels == "torch":
        raise SettingsError(
            f"--batch-invariant on needs --kernels triton on {device.type}, not torch: torch's "
            "products depend on the number of rows; use --kernels auto or --batch-invariant off"
        )
    return True


def find_device(name: str, cuda_devices: int) -> torch.device:
    """The device that `name` means: cpu, cuda (the first one) or cuda:N. `cuda_devices` is the
    number of CUDA devices. Raises SettingsError for a device that does not exist."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if not cuda_devices:
        raise SettingsError(f"--device {name}: torch finds no CUDA device; use cpu")
    if index >= cuda_devices:
        names = ", ".join(f"cuda:{number}" for number in range(cuda_devices))
        raise SettingsError(f"--device {name}: torch finds no such device; use one of {names}")
    return torch.device("cuda", index)


def unused_gpus(name: str, cuda_devices: int) -> str:
    """What to say about GPUs that this process sees and does not use; empty if there is nothing to
    say, as for a device that was chosen by its number."""
    if name != "cuda" or cuda_devices < 2:
        return ""
    return (
        f"this process sees {cuda_devices} GPUs and uses one, cuda:0, as an engine runs on one: "
        "start an engine per GPU, or limit the container to one (nvidia.com/gpu: 1)"
    )


def _room(
    settings: TorchSettings, device: torch.device, free_bytes: int | None
) -> MemoryBudget | None:
    given = settings.kv_memory is not None or settings.kv_blocks is not None
    if not settings.overcommit:
        check_asked({"--host-kv-memory": settings.host_kv_memory}, free_bytes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = 1.0 if given else settings.gpu_memory_utilization
        return MemoryBudget(total=total, others=total - free, share=share)
    if free_bytes is None or (given and settings.overcommit):
        return None
    others = 0 if settings.overcommit else settings.host_kv_memory
    return MemoryBudget(total=free_bytes, others=others, share=1.0 if given else CPU_SHARE)


def _num_blocks(demand: MemoryDemand, room: MemoryBudget | None) -> int:
    """Number of blocks of the pool, without padding. Raises SettingsError if weights, a step and
    one sequence do not fit, or if the KV memory is smaller than one block."""
    if room is not None:
        check_fit(demand, room)
    blocks = demand.pool_blocks
    size = demand.kv_memory
    if blocks is None:
        size = CPU_KV_BYTES
        blocks = size // demand.layout.block_bytes
        if room is not None:
            free = free_blocks(demand, room)
            blocks = free if demand.device == "cuda" else min(free, blocks)
    if not blocks:
        raise SettingsError(
            f"{size} bytes of KV memory hold no block of {demand.layout.block_bytes} bytes; "
            "raise --kv-memory"
        )
    if blocks < demand.layout.num_groups:
        raise SettingsError(
            f"{blocks} KV blocks are fewer than the {demand.layout.num_groups} groups of layers, "
            "and each token needs a block per group; raise --kv-memory or --kv-blocks"
        )
    return blocks


def _max_model_len(demand: MemoryDemand, num_blocks: int) -> int:
    """The maximum length of a sequence in tokens: as asked, or the smaller of the model's limit and
    the pool. Raises SettingsError if the pool is too small for the length asked."""
    wanted, room = demand.max_model_len, demand.layout.tokens_in(num_blocks)
    if wanted is None:
        most = min(demand.config.max_positions, room)
        return most if demand.longest is None else min(most, demand.longest)
    if wanted > room:
        raise SettingsError(
            f"--max-model-len {wanted} does not fit the KV pool of {room} tokens; "
            "raise --kv-memory or --kv-blocks, or lower --max-model-len"
        )
    return wanted
