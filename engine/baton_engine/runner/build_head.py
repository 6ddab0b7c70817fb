"""Load a head that drafts from hidden states, and join it to the target's runner."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.attention.selector import attention_for
from baton_engine.kv.kv_pool import TORCH_DTYPES, TorchMemory
from baton_engine.layers.ops import Ops
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.head_bytes import head_layout
from baton_engine.models.decoder import Decoder
from baton_engine.models.heads.build import build_head
from baton_engine.models.heads.head import Head
from baton_engine.models.heads.medusa import Medusa
from baton_engine.models.model import Model
from baton_engine.runner.head_drafts import HeadDrafts, HeadSizes
from baton_engine.runner.medusa_drafts import MedusaDrafts
from baton_engine.runner.model_runner import TorchRunner
from baton_engine.runner.plan import EnginePlan, PlannedHead
from baton_engine.speculation.proposer import Proposer
from baton_engine.weights.dummy import fill_slots
from baton_engine.weights.head_files import load_head


@dataclass(frozen=True, slots=True)
class LoadedHead:
    planned: PlannedHead
    module: Head | Medusa


def load_planned(planned: PlannedHead, slots: WeightSlots, target: Model) -> LoadedHead:
    """Build the head and load its weights; without names of tensors these are random. Raises
    WeightsError. From now on the target returns the hidden states that the head takes."""
    assert isinstance(target, Decoder), "transformers' code gives no hidden states"
    config = planned.config
    module: Head | Medusa
    if config.method == "medusa":
        module = Medusa(config, slots, target)
    else:
        module = build_head(config, slots, target, own_embedding=planned.own_embedding)
    if planned.names is None:
        fill_slots(slots)
    else:
        load_head(config, slots)
    slots.finish()
    target.kept_layers = config.kept_layers
    return LoadedHead(planned, module)


def head_proposer(plan: EnginePlan, head: LoadedHead, runner: TorchRunner, ops: Ops) -> Proposer:
    """The head's proposer, which `runner` tells of its steps."""
    made: HeadDrafts | MedusaDrafts
    module, config = head.module, head.planned.config
    if isinstance(module, Medusa):
        made = MedusaDrafts(module, ops, plan.demand.max_num_seqs)
        runner.tap = made
        return made
    dtype, block_size = plan.demand.dtype, plan.layout.block_size
    sizes = HeadSizes(
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.demand.max_num_seqs,
        max_batched_tokens=plan.demand.max_batched_tokens,
        most_drafts=head.planned.drafts,
    )
    layout = head_layout(config, dtype, block_size)
    memory = TorchMemory(layout, sizes.all_blocks(block_size), plan.device)
    attention = attention_for(
        plan.kernels, memory, config.layer, exact=False, dtype=TORCH_DTYPES[dtype]
    )
    made = HeadDrafts(module, ops, memory, attention, plan.layout, sizes)
    runner.tap = made
    return made
