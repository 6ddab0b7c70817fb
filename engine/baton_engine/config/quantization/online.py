"""--quantization: plain weights are quantized while they are loaded. No torch.

The head, routers and the gate of a shared MLP stay plain: they are small, or the answer depends on
their smallest differences. So does kv_b_proj of latent attention, which is multiplied in two parts
that need plain numbers, and embeddings, which are looked up. A model that drafts has a head in 8
bits: no answer depends on it, and of a small model it is a large part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton_engine.config.quantization.patterns import ANY, HEAD, ROUTERS
from baton_engine.config.quantization.scheme import QuantizationConfig, WeightScheme
from baton_protocol.policies import Quantization

LAYOUT = "online"
# Inputs per scale and shift of int4.
INT4_GROUP = 32
SCHEMES: Mapping[Quantization, WeightScheme] = {
    "fp8": WeightScheme(layout=LAYOUT, numbers="fp8"),
    "int8": WeightScheme(layout=LAYOUT, numbers="int8"),
    "int4": WeightScheme(layout=LAYOUT, numbers="int4", inputs=INT4_GROUP, shifted=True),
}
HEAD_OF_DRAFTS: Mapping[Quantization, Quantization] = {
    **{"fp8": "fp8", "int8": "int8", "int4": "int8"},
}
PLAIN = (HEAD, ROUTERS, rf"{ANY}[.]kv_b_proj")
# Experts that a checkpoint has in transposed tensors for all of them, as gpt-oss.
TRANSPOSED_EXPERTS = r".*\.experts(\..*)?"


def online_config(
    quantization: Quantization, *, transposed_experts: bool, drafts: bool = False
) -> QuantizationConfig | None:
    """How the weights of a plain checkpoint are quantized, of a model that drafts or of another;
    None if they are not."""
    if quantization == "none":
        return None
    ignored = (*PLAIN, TRANSPOSED_EXPERTS) if transposed_experts else PLAIN
    config = QuantizationConfig(
        method=f"--quantization {quantization}",
        schemes=((ANY, SCHEMES[quantization]),),
        ignored=ignored,
    )
    if not drafts:
        return config
    head = SCHEMES[HEAD_OF_DRAFTS[quantization]]
    return replace(config, named=((HEAD, head),), tied_head=head)
