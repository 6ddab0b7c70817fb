"""How many bytes an engine takes, from the shapes alone: before a weight is read, without torch.

In: the model, the layout of its KV, the largest step. Out: bytes of weights, of the tensors that
live while a step is computed, of what CUDA graphs keep, and of KV.

    pool = share * total - held by others - weights - activations - graphs - spare

The formulas count the most that is alive at one time. Per token, in the compute dtype: the residual
stream, what is added to it and its norm (3 D), beside attention's q, k and v, rotated ones and
output (2 Z H + N H), or the MLP's gate, up and product (4 F). Of the rows that are sampled: logits,
and what sampling makes of them.

Shapes: T tokens of the step, D hidden size, F MLP size, N query heads, K kv heads, Z = N + 2 K,
H head_dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.config.engine_config import SCORES_AT_ONCE
from baton_engine.config.model_config import ModelConfig
from baton_protocol.layout import ITEM_BYTES, KVLayout

GIB = 1 << 30
# So many rows of logits exist at one time where a prompt's own tokens are scored.
SCORED_ROWS = 128
LOGIT_BYTES = 4  # float32 in every compute dtype
# Bytes per logit beside the logit itself: one changed copy and the log-probabilities in float32;
# without kernels also temperatures applied, the noise and the integers that it is made of.
SAMPLING_BYTES = {"triton": 12, "torch": 32}
# Without kernels rows that decode are computed in groups that see no more.
GROUP_BLOCKS = 8192
SCORE_BYTES = 20  # its place, and three times the score
PRODUCT_BYTES = 14
# Libraries' workspaces, small tensors, what the allocator cannot use again.
SPARE_BYTES = {"cpu": 64 << 20, "cuda": 384 << 20}
# What the driver keeps of one recorded step: some 10 launches for each of a model's layers.
GRAPH_LAYER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes found on the device when the weights were there: what this process holds for good, and
    what the largest step took beside it."""

    resident: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an engine is to hold and to compute. `kv_memory` (bytes) or `kv_blocks` is a pool of a
    given size; without a `max_model_len` it is what the pool holds. What was `measured` counts
    instead of the formulas."""

    config: ModelConfig
    layout: KVLayout
    device: str  # "cpu" or "cuda"
    kernels: str  # "torch" or "triton"
    graphs: bool
    max_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None = None
    kv_memory: int | None = None
    kv_blocks: int | None = None
    measured: Measured | None = None

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.layout.dtype]

    @property
    def pool_blocks(self) -> int | None:
        """Blocks of a pool whose size was given."""
        if self.kv_blocks is None and self.kv_memory is not None:
            return self.kv_memory // self.layout.block_bytes
        return self.kv_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the device has, in bytes: in all, held by others (and for good), the share of all that
    is not to be exceeded."""

    total: int
    others: int = 0
    share: float = 1.0

    @property
    def limit(self) -> int:
        return max(0, int(self.total * self.share) - self.others)


def count_weights(config: ModelConfig) -> int:
    """How many numbers the slots of this model hold."""
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    layer = hidden * (2 * queries + 2 * keys + 3 * config.intermediate_size) + 2 * hidden
    layer += (queries + 2 * keys) * config.qkv_bias + hidden * config.output_bias
    layer += (2 * config.intermediate_size + hidden) * config.mlp_bias + 2 * width * config.qk_norm
    heads = 1 if config.tied else 2
    return heads * config.vocab_size * hidden + config.num_layers * layer + hidden


def weight_bytes(demand: Demand) -> int:
    """Of the weights in the compute dtype. A CPU packs its matrices: the head is there a second
    time, for good where it is tied to the embedding, else while it is packed."""
    packed = demand.config.vocab_size * demand.config.hidden_size if demand.device == "cpu" else 0
    return (count_weights(demand.config) + packed) * demand.item


def resident_bytes(demand: Demand) -> int:
    """Of what stays on the device whatever is computed; all but weights is in `spare` as long as it
    was not measured."""
    return demand.measured.resident if demand.measured else weight_bytes(demand)


def activation_bytes(demand: Demand, length: int) -> int:
    """Of the largest step: `max_batched_tokens` tokens, `max_num_seqs` sampled rows, a sequence of
    `length` tokens among them."""
    if demand.measured:
        return demand.measured.step
    seen = _reading_bytes(demand, length) if demand.kernels == "torch" else 0
    return _step_bytes(demand, demand.max_batched_tokens) + seen


def graph_bytes(demand: Demand) -> int:
    """All graphs share the tensors of the largest; each keeps its launches."""
    if not demand.graphs:
        return 0
    records = num_graphs(demand.max_num_seqs) * demand.config.num_layers * GRAPH_LAYER_BYTES
    return _step_bytes(demand, demand.max_num_seqs) + records


def num_graphs(max_num_seqs: int) -> int:
    """Sizes of decode steps that are recorded: 1, 2, 4, 8, by 8 to 256, then by 16 to the top."""
    small = sum(size < min(8, max_num_seqs) for size in (1, 2, 4))
    by_8 = -(-min(max_num_seqs, 256) // 8)
    by_16 = -(-max(0, max_num_seqs - 256) // 16)
    return small + by_8 + by_16


def fixed_bytes(demand: Demand, length: int) -> int:
    """Everything but KV."""
    parts = (resident_bytes(demand), activation_bytes(demand, length), graph_bytes(demand))
    return sum(parts) + SPARE_BYTES[demand.device]


def pool_bytes(demand: Demand, num_blocks: int) -> int:
    """Of a pool with so many usable blocks; the one for padding comes on top."""
    return (num_blocks + 1) * demand.layout.block_bytes


def blocks_for(demand: Demand, length: int) -> int:
    """Blocks of one sequence."""
    return -(-length // demand.layout.block_size)


def _step_bytes(demand: Demand, tokens: int) -> int:
    config = demand.config
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = (2 * heads + config.num_heads) * config.head_dim
    mlp = 4 * config.intermediate_size
    layers = tokens * (3 * config.hidden_size + max(attention, mlp)) * demand.item
    rows = max(demand.max_num_seqs, min(tokens, SCORED_ROWS))
    logits = rows * config.vocab_size * (LOGIT_BYTES + SAMPLING_BYTES[demand.kernels])
    # One after the other; of the layers the hidden states are left.
    return max(layers, tokens * config.hidden_size * demand.item + logits)


def _reading_bytes(demand: Demand, length: int) -> int:
    """Of what attention makes without kernels, for one layer at a time: for a piece of a prompt a
    copy of the K and V before it, a mask, and in bf16 on a CPU scores; for rows that decode a copy
    of all that they see, or in float32 on a CPU, where they read it in place, scores and where they
    stand. Copies may be made twice: as K and V lie in the pool, and as the product wants them."""
    layout = demand.layout
    blocks = min(GROUP_BLOCKS, demand.max_num_seqs * blocks_for(demand, length))
    copied = length
    scores = 0
    if (demand.device, layout.dtype) == ("cpu", "float32"):
        scores = SCORE_BYTES * demand.config.num_heads * blocks * layout.block_size
    else:
        copied = max(length, blocks * layout.block_size)
    if (demand.device, layout.dtype) == ("cpu", "bfloat16"):
        tokens = min(demand.max_batched_tokens, length)
        one_token = demand.config.num_heads // layout.num_kv_heads * length
        most = max(SCORES_AT_ONCE, one_token)
        scores = PRODUCT_BYTES * min(demand.config.num_heads * tokens * length, most)
    mask = min(demand.max_batched_tokens, length) * length * (demand.item + 2)
    copies = 2 * 2 * layout.num_kv_heads * layout.head_dim * copied * demand.item
    return copies + scores + mask
