"""Products whose inputs are rounded to int8, too, are those of the integers.

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
@pytest.mark.parametrize("layout", ["w8a8", "w8a8 static"])
def test_products_are_those_of_integers(layout: str, dtype: torch.dtype) -> None:
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
    for name, tensor in tensors.items():
        slots.parameters[f"{LAYER}.{name}"].load(tensor)
    out_TO = quantized_twin(finish(), None)(x_TI)
    assert out_TO.dtype == dtype

    scale_T1 = x_TI.double().abs().amax(1, keepdim=True) / 127
    scale_T1[scale_T1 == 0] = 1
    if "input_scale" in tensors:
        scale_T1 = torch.full_like(scale_T1, float(tensors["input_scale"]))
    codes_TI = (x_TI.double() / scale_T1).round().clamp(-128, 127)
    expected_TO = codes_TI @ tensors["weight"].double().t() * scale_T1
    expected_TO *= tensors["weight_scale"].double().t()
    close = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out_TO.double(), expected_TO, rtol=close, atol=1e-4)
