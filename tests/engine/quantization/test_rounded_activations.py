"""Products whose inputs are rounded, too, are those of the rounded numbers.

Shapes: T rows, O and I a linear's output and input size.
"""

from __future__ import annotations

import pytest
import torch

from baton_engine.config.quantization.read import KEY, read_quantization
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import quantized_twin
from baton_engine.layers.quantization.weight_format import format_of
from tests.support.engines.quantized.quantized_models import LAYOUTS

LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layout",
    ["w8a8", "w8a8 static", "fp8 tensor", "fp8 tensor static", "w8a8 float", "w8a8 float static"],
)
def test_products_are_those_of_rounded_numbers(layout: str, dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)
    x_TI = torch.randn(5, 48, generator=noise).to(dtype)
    x_TI[1] = 0
    x_TI[2] *= 100  # beyond the static scale
    tensors, _ = LAYOUTS[layout].quantize(torch.randn(40, 48, generator=noise))
    config = read_quantization({KEY: LAYOUTS[layout].config})
    scheme = None if config is None else config.scheme_of(LAYER)
    assert scheme is not None
    slots = WeightSlots(dtype, torch.device("cpu"))
    finish = format_of(scheme).declare(slots, LAYER, 40, 48)
    slots.use_spelling([f"{LAYER}.{name}" for name in tensors])
    for name, tensor in tensors.items():
        slots.parameters[f"{LAYER}.{name}"].load(tensor)
    out_TO = quantized_twin(finish(), None)(x_TI)
    assert out_TO.dtype == dtype

    integers = scheme.numbers == "int8"
    scale_T1 = x_TI.float().abs().amax(1, keepdim=True) / (127 if integers else 448)
    scale_T1[scale_T1 == 0] = 1
    for name in {"input_scale", "activation_scale"} & tensors.keys():
        scale_T1 = torch.full_like(scale_T1, float(tensors[name]))
    codes_TI = x_TI.float() / scale_T1
    if integers:
        codes_TI = codes_TI.round().clamp(-128, 127).double()
    else:
        codes_TI = codes_TI.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    expected_TO = codes_TI @ tensors["weight"].double().t() * scale_T1
    [scale_name] = {"weight_scale", "weight_scale_inv"} & tensors.keys()
    scale = tensors[scale_name].double()
    expected_TO *= scale.t() if scale.dim() == 2 else scale
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out_TO.double(), expected_TO, rtol=close, atol=1e-4)
