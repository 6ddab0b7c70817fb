"""KV for which a checkpoint is made: `kv_cache_scheme` and `kv_cache_quant_algo`. No torch.

In: a quantization_config. Out: the value of --kv-cache-dtype that `auto` stands for.

Such a checkpoint has scales of K and V, one per layer or head. They are not used: the cache has a
power of two per token and head, which is that of the row's largest number (see `kv.eight_bits`), so
no row is cut off at a range that was measured before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_engine.config.config_json import ConfigFields
from baton_engine.config.quantization.refusals import FILE, refused
from baton_protocol.policies import KVCacheDType

# The dtypes of codes for the values of --kv-cache-dtype that keep KV in 8 bits.
CODES_OF: Mapping[KVCacheDType, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}

SCHEME, ALGORITHM = "kv_cache_scheme", "kv_cache_quant_algo"
# (type, num_bits) of compressed-tensors, whose scheme ModelOpt has, too.
SCHEMES: Mapping[tuple[str, int], KVCacheDType] = {("float", 8): "fp8", ("int", 8): "int8"}
ALGORITHMS: Mapping[str, KVCacheDType] = {"FP8": "fp8", "INT8": "int8"}
SUPPORTED = "type float or int with num_bits 8"
# AutoFP8 says only when its scales are found.
WHEN = ("static", "dynamic")
# How the names of the scales' tensors end. AutoFP8 has one for K and V together.
SCALES = (".k_scale", ".v_scale", ".kv_scale")


def read_kv_cache(values: Mapping[str, Any], method: str) -> KVCacheDType:
    """The KV of a config with SCHEME or ALGORITHM; "auto" without one."""
    if isinstance(values.get(SCHEME), str) and values[SCHEME] in WHEN:
        return "fp8"
    fields = ConfigFields(values, FILE)
    found: list[KVCacheDType] = []
    if (algorithm := fields.text(ALGORITHM)) is not None:
        if algorithm not in ALGORITHMS:
            raise refused(method, ALGORITHM, algorithm, ", ".join(ALGORITHMS))
        found.append(ALGORITHMS[algorithm])
    if scheme := fields.part(SCHEME):
        inner = ConfigFields(scheme, f"{FILE}, {SCHEME}")
        kind = inner.text("type") or "int", inner.integer("num_bits", 8)
        if kind not in SCHEMES:
            raise refused(method, SCHEME, scheme, SUPPORTED)
        found.append(SCHEMES[kind])
    if len(set(found)) > 1:
        raise refused(method, ALGORITHM, values[ALGORITHM], f"that of {SCHEME}")
    return found[0] if found else "auto"
