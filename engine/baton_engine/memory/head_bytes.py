"""What a head that drafts from hidden states adds to an engine's memory. No torch.

In: the head's config. Out: a HeadDemand. The head's KV has a block for each of the target's.

Shapes: D hidden size of the head, C numbers that the target returns of a token, V vocabulary.
"""

from __future__ import annotations

from baton_engine.config.head_config import HeadConfig
from baton_engine.config.step_sizes import KEPT_POSITIONS
from baton_engine.memory.demand import HeadDemand
from baton_protocol.layout import ITEM_BYTES, KVLayout

FLOAT32_BYTES = 4


def head_layout(head: HeadConfig, dtype: str, block_size: int) -> KVLayout:
    """The layout of the head's KV. It is kept in the compute dtype."""
    return KVLayout.of_fields(
        head.layer.kv_fields(dtype)[0], num_layers=1, block_size=block_size, chunk_blocks=1
    )


def head_demand(
    head: HeadConfig, dtype: str, block_size: int, kernels: str, *, drafts: int, own_embedding: bool
) -> HeadDemand:
    """`drafts` is the most drafts of a sequence. With `own_embedding`, the checkpoint has one that
    is not shared with the target."""
    item, size = ITEM_BYTES[dtype], head.layer.hidden_size
    kept = len(head.kept_layers) * head.target_size
    if not head.keeps_kv:
        return HeadDemand(
            weights=_medusa_weights(head) * item,
            sequence=(1 + drafts) * size * item,
            token=size * item,
        )
    block = head_layout(head, dtype, block_size).block_bytes
    steps = head.counts().step(head.layer, 0, kernels)
    largest = max(part.compute * item + part.float32 * FLOAT32_BYTES for part in steps)
    # What the target returns (kept apart, joined, and the part that the head takes), and the head's
    # states, embeddings, both joined, residual, delta and norm.
    numbers = 3 * kept + head.target_size + 8 * size
    return HeadDemand(
        weights=_layer_weights(head, item, own_embedding=own_embedding),
        block=block,
        sequence=-(-drafts // block_size) * block + KEPT_POSITIONS * size * item,
        token=numbers * item + largest,
        returned=kept,
    )


def _medusa_weights(head: HeadConfig) -> int:
    size = head.target_size
    return head.heads * (head.blocks * (size + 1) * size + head.vocab_size * size)


def _layer_weights(head: HeadConfig, item: int, *, own_embedding: bool) -> int:
    """Bytes of the head's weights: its layer, of which some may be quantized, and what joins the
    inputs and makes logits."""
    layer, size = head.layer, head.layer.hidden_size
    numbers = head.counts().weights(layer, 0) + size  # and one bias
    if head.method == "eagle3":
        outputs = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        numbers += outputs * size  # q, k and v of the second input
        numbers += 3 * head.target_size * size + 2 * size + head.vocab_size * size
    else:
        numbers += 2 * size * size + 3 * size
    if own_embedding:
        numbers += layer.vocab_size * size
    size_quantized = 0
    if layer.quantization is not None:
        for linear in head.counts().linears(layer, 0):
            name = linear.name.replace("model.layers.0", head.name, 1)
            scheme = layer.quantization.scheme_of(name)
            if scheme is not None:
                numbers -= linear.count * linear.outputs * linear.inputs
                size_quantized += linear.count * scheme.weight_bytes(linear.outputs, linear.inputs)
    return numbers * item + size_quantized
