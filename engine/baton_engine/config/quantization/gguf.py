"""How the weights of a GGUF file are quantized: each tensor has a type of its own. No torch.

5- and 6-bit codes take 8 bits in memory, and 2- and 3-bit codes take 4. Scales are float32 in
memory: files have them in 4 to 16 bits, some of them times another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton_engine.config.quantization.scheme import Numbers, QuantizationConfig, WeightScheme

_Schemes = Mapping[str, WeightScheme]

METHOD = "GGUF"
EMBEDDING = "model.embed_tokens"
LAYOUT = "gguf "  # and the type


def _schemes(numbers: Numbers, group: int, *kinds: str, shifted: bool = False) -> _Schemes:
    return {
        kind: WeightScheme(layout=LAYOUT + kind, numbers=numbers, inputs=group, shifted=shifted)
        for kind in kinds
    }


# By the type of the tensor.
SCHEMES: _Schemes = {
    **_schemes("int4", 32, "Q4_0"),
    **_schemes("int4", 32, "Q4_1", "Q4_K", shifted=True),
    **_schemes("int4", 16, "Q3_K"),
    **_schemes("int4", 16, "Q2_K", shifted=True),
    **_schemes("int8", 32, "Q5_0", "Q8_0"),
    **_schemes("int8", 32, "Q5_1", "Q5_K", shifted=True),
    **_schemes("int8", 16, "Q6_K"),
}


def quantization_of(types: Iterable[tuple[str, str]]) -> QuantizationConfig | None:
    """By the name of each layer in checkpoints and the type of its weight."""
    named = {layer: SCHEMES[kind] for layer, kind in types if kind in SCHEMES}
    if not named:
        return None
    embedding = named.pop(EMBEDDING, None)
    return QuantizationConfig(
        method=METHOD, schemes=(), named=tuple(named.items()), embedding=embedding
    )
