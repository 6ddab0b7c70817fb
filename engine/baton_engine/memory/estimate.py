"""Estimate an engine's memory from shapes, before weights are read and without torch.

In: the model, the layout of its KV, and the largest step. Out: bytes of weights, of the tensors
that are alive during a step, of CUDA graphs, and of KV.

    pool = share * total - held by others - weights - activations - graphs - spare

The formulas count the peak of live tensors. Per token: the residual stream, the delta added to it
and its norm (3 D), and what the layer holds in its attention or in its MLP, which the family counts
(see `config.layer_counts`). Per sampled row: the logits and the tensors that sampling makes from
them.

Shapes: T tokens of the step, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

from baton_engine.config.buckets import buckets
from baton_engine.config.families import find_family
from baton_engine.config.layer_counts import DECODER, LayerCounts
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.step_sizes import (
    ENCODER_QUERIES,
    KEYS_COPIED,
    PROMPT_ROWS,
    SCORES_AT_ONCE,
    SPLIT_KEYS,
    STORED_SPLIT_BYTES,
    split_blocks,
)
from baton_engine.memory.demand import Measured, MemoryBudget, MemoryDemand
from baton_protocol.layout import CODES

GIB = 1 << 30
FLOAT32_BYTES = 4
HEAD_NAME = "lm_head"  # the head's layer in checkpoints
LOGIT_BYTES = 4  # float32 in every compute dtype
# Bytes per logit in addition to the logit itself. With kernels, most exist while a grammar's mask
# is applied: four float32 copies (the raw logits that logprobs need, those to change, and the
# mask's input and output) and two bools. Without kernels, most exist later: the scaled logits, the
# noise and the integers it is computed from.
SAMPLING_BYTES = {"triton": 18, "torch": 32}
# Bytes per score of torch's attention, in addition to those that depend on dtype and head size: two
# float32 numbers, a product padded to more rows, and a mask.
SCORE_BYTES = 13
# Of an encoder: bytes per score (a product, its float32 numbers, weights, and their copy), and per
# pair of tokens in the mask of a layer with a window (a bool, and an integer while it is made).
ENCODER_SCORE_BYTES = 16
MASK_BYTES = 9
# Workspaces of libraries, small tensors and fragmentation.
SPARE_BYTES = {"cpu": 64 << 20, "cuda": 384 << 20}
# What the driver keeps per layer of a recorded step: about 10 launches.
GRAPH_LAYER_BYTES = 64 << 10
# Most that a process takes on a card beside torch's memory after its context exists: the code of
# kernels and libraries, loaded when it is first used.
LOADED_CODE_BYTES = 256 << 20


def measured_bytes(*, reserved: int, step: int, free: int, room: MemoryBudget) -> Measured:
    """What this process keeps and what a step took, from the bytes that torch has `reserved`, those
    that it reserved in addition during the `step`, and the bytes that are `free` on the card.

    `room` was read before, with this process's context among the others. What the card lost since
    then, beside torch's bytes, is code that this process loaded, or other processes took or gave
    back memory. The two cannot be told apart, so at most LOADED_CODE_BYTES of it count as ours.
    """
    beside = room.total - free - room.others - reserved
    return Measured(resident=reserved + min(max(0, beside), LOADED_CODE_BYTES), step=step)


@lru_cache
def count_weights(config: ModelConfig) -> int:
    """Number of parameters of this model."""
    if config.bridge is not None:
        return config.bridge.weights
    hidden, counts = config.hidden_size, counts_of(config)
    layers = sum(counts.weights(config, layer) for layer in range(config.num_layers))
    heads = 2 if config.has_own_head else 1
    return heads * config.vocab_size * hidden + layers + hidden + config.classes * hidden


@lru_cache
def quantized_part(config: ModelConfig) -> tuple[int, int]:
    """How many of the weights are quantized, and their bytes with those of their scales, shifts and
    orders of inputs."""
    numbers = size = 0
    if config.quantization is not None and config.bridge is None:
        linears = counts_of(config).linears
        for layer in range(config.num_layers):
            for linear in linears(config, layer):
                scheme = config.quantization.scheme_of(linear.name)
                if scheme is not None:
                    numbers += linear.count * linear.outputs * linear.inputs
                    size += linear.count * scheme.weight_bytes(linear.outputs, linear.inputs)
        head = (config.vocab_size, config.hidden_size)
        ends = [config.quantization.embedding]
        if config.has_own_head:
            ends.append(config.quantization.scheme_of(HEAD_NAME))
        for scheme in ends:
            if scheme is not None:
                numbers += head[0] * head[1]
                size += scheme.weight_bytes(*head)
    return numbers, size


def weight_bytes(demand: MemoryDemand) -> int:
    """Bytes of the weights, those of a draft model included."""
    second = demand.of_draft_model
    return _model_bytes(demand) + (0 if second is None else _model_bytes(second))


def _model_bytes(demand: MemoryDemand) -> int:
    """Bytes of a model's weights: plain ones in the compute dtype, quantized ones by their scheme.
    On a CPU, packing makes a second copy of the head: permanently if it is tied to the embedding,
    else while it is packed."""
    config = demand.config
    numbers, size = quantized_part(config)
    plain = (count_weights(config) - numbers) * demand.item
    if config.pooling:
        return plain + size
    if demand.device != "cpu" and not _copies_head(config):
        return plain + size
    return plain + size + head_bytes(config, demand.item)


def _copies_head(config: ModelConfig) -> bool:
    """Whether a tied head multiplies a quantized copy of the embedding, on each device."""
    return config.tied and config.quantization is not None and bool(config.quantization.tied_head)


def embedding_bytes(config: ModelConfig, item: int) -> int:
    """Bytes of the embedding, of which a step reads one row per token."""
    shape, scheme = (config.vocab_size, config.hidden_size), None
    if config.quantization is not None:
        scheme = config.quantization.embedding
    return shape[0] * shape[1] * item if scheme is None else scheme.weight_bytes(*shape)


def head_bytes(config: ModelConfig, item: int) -> int:
    """Bytes of the head as it is multiplied, a copy of a tied embedding included."""
    head, scheme = (config.vocab_size, config.hidden_size), None
    if config.quantization is not None:
        tied = config.quantization.tied_head or config.quantization.embedding
        scheme = tied if config.tied else config.quantization.scheme_of(HEAD_NAME)
    return head[0] * head[1] * item if scheme is None else scheme.weight_bytes(*head)


def resident_bytes(demand: MemoryDemand) -> int:
    """Bytes that stay on the device between steps. Without a measurement these are the weights, and
    SPARE_BYTES covers the rest."""
    if demand.measured:
        return demand.measured.resident
    return weight_bytes(demand) + demand.head.weights


def activation_bytes(demand: MemoryDemand, length: int) -> int:
    """Bytes of the largest step: `max_batched_tokens` tokens and `max_num_seqs` sampled rows, with
    a sequence of `length` tokens among them. A draft model's steps come before the target's."""
    if demand.measured:
        return demand.measured.step
    second = demand.of_draft_model
    return max(_all_step_bytes(each, length) for each in (demand, second) if each is not None)


def _all_step_bytes(demand: MemoryDemand, length: int) -> int:
    seen = 0
    if demand.kernels == "torch":
        seen = _attention_bytes(demand, length)
    return _step_bytes(demand, demand.max_batched_tokens) + seen


def graph_bytes(demand: MemoryDemand) -> int:
    """Bytes of the CUDA graphs, those of a draft model included."""
    second = demand.of_draft_model
    return _own_graph_bytes(demand) + (0 if second is None else _own_graph_bytes(second))


def _own_graph_bytes(demand: MemoryDemand) -> int:
    """Bytes of a model's graphs, which record the layers and not the sampling. All share the
    tensors of the largest; each keeps its launches and its hidden states."""
    if not demand.graphs:
        return 0
    sizes = buckets(demand.max_num_seqs)
    launches = len(sizes) * demand.config.num_layers * GRAPH_LAYER_BYTES
    hidden = sum(sizes) * (demand.config.hidden_size + demand.head.returned) * demand.item
    return _layers_bytes(demand, sizes[-1]) + launches + hidden


def head_step_bytes(demand: MemoryDemand) -> int:
    """Bytes of a head that drafts, without its weights and what it has for each block."""
    head = demand.head
    return head.sequence * demand.max_num_seqs + head.token * demand.max_batched_tokens


def fixed_bytes(demand: MemoryDemand, length: int) -> int:
    """Bytes of everything except KV, with a sequence of `length` tokens."""
    parts = (resident_bytes(demand), activation_bytes(demand, length), graph_bytes(demand))
    return sum(parts) + head_step_bytes(demand) + SPARE_BYTES[demand.device]


def pool_bytes(demand: MemoryDemand, num_blocks: int) -> int:
    """Bytes of a pool with `num_blocks` usable blocks and the padding block, and of the pool of a
    head or of a draft model beside it."""
    own = (num_blocks + 1) * demand.block_bytes
    if demand.draft_model is None:
        return own
    return own + (demand.draft_model_blocks(num_blocks) + 1) * demand.draft_model.layout.block_bytes


def blocks_in(demand: MemoryDemand, size: int) -> int:
    """The largest number of blocks whose pool, and the one beside it, take at most `size` bytes;
    negative if no pool does."""
    if demand.draft_model is None:
        return size // demand.block_bytes - 1
    groups = demand.layout.num_groups
    span = pool_bytes(demand, groups) - pool_bytes(demand, 0)
    return (size - pool_bytes(demand, 0)) // span * groups


def blocks_for(demand: MemoryDemand, length: int) -> int:
    """Number of blocks of a sequence of `length` tokens, over all groups of layers. Windows do not
    lower it, although a sequence releases the blocks that a window has left: it may start with
    blocks for all its tokens."""
    return -(-length // demand.layout.block_size) * demand.layout.num_groups


def _step_bytes(demand: MemoryDemand, tokens: int) -> int:
    config = demand.config
    rows = max(demand.max_num_seqs, min(tokens, PROMPT_ROWS))
    logits = rows * config.vocab_size * (LOGIT_BYTES + SAMPLING_BYTES[demand.kernels])
    if config.pooling:
        logits = 0
    # Layers and sampling run one after the other; sampling still holds the hidden states.
    return max(_layers_bytes(demand, tokens), tokens * config.hidden_size * demand.item + logits)


def _layers_bytes(demand: MemoryDemand, tokens: int) -> int:
    """Bytes of a step's tensors up to its hidden states, without those of `_attention_bytes`."""
    largest = _largest_part(demand.config, demand.kernels, demand.item)
    layers = tokens * (3 * demand.config.hidden_size * demand.item + largest)
    return layers + (STORED_SPLIT_BYTES if demand.stored_splits else 0)


@lru_cache
def _largest_part(config: ModelConfig, kernels: str, item: int) -> int:
    """The most bytes per token that a step holds in a part of a layer."""
    counts = counts_of(config)
    return max(
        part.compute * item + part.float32 * FLOAT32_BYTES
        for layer in range(config.num_layers)
        for part in counts.step(config, layer, kernels)
    )


def counts_of(config: ModelConfig) -> LayerCounts:
    """What the model's family tells of its layers."""
    family = find_family(config.architecture)
    return DECODER if family is None else family.counts


def _attention_bytes(demand: MemoryDemand, length: int) -> int:
    """Bytes of the tensors that torch's attention allocates, for one layer at a time: copies of K
    and V; and per score of the tokens and heads that are computed at a time the numbers of
    SCORE_BYTES, products and weights in the compute dtype, and sums of V for each split.
    """
    layout, config, item = demand.layout, demand.config, demand.item
    if config.encodes:
        scores = config.num_heads * min(length, ENCODER_QUERIES)
        return (ENCODER_SCORE_BYTES * scores + MASK_BYTES * length) * length
    split = split_blocks(layout.block_size) * layout.block_size
    keys = -(-length // split) * split
    queries = max(min(demand.max_batched_tokens, length), demand.max_num_seqs)
    scores = min(config.num_heads * queries * keys, max(SCORES_AT_ONCE, config.num_heads * keys))
    value_dim = max(spec.value_dim for spec in config.attention)
    score_bytes = SCORE_BYTES + 3 * item + 3 * item * value_dim // SPLIT_KEYS
    kept = max(field.heads * field.size for fields in layout.group_fields for field in fields)
    # Latent rows are copied as K, and as V in two steps.
    copied = item * (2 if config.latent is None else 3)
    if layout.dtype in CODES:  # rows that are no whole vectors are copied as codes first
        copied += 1
    copies = copied * max(kept * keys, KEYS_COPIED)
    return copies + score_bytes * scores
