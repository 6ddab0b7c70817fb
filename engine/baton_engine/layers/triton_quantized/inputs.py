"""The inputs of a product with a quantized weight, where it asks for others than the layer's.

In: a step's inputs. Out: the inputs in the weight's order, rounded as it asks, the scale of each
row, and the sums that shifts are multiplied with. One launch, with a program per row: a row's bits
do not depend on the others. Torch twin: `quantized_weight.input_codes`.

Shapes: T rows, I inputs of the layer, P places of the weight, U units, of which each has a sum. In
a program: C places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.layers.triton_quantized.weight import Inputs

# Places that a program computes at a time.
PLACES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    x_TP: torch.Tensor
    factors_T: torch.Tensor | None  # float32; results are multiplied with them
    sums_TU: torch.Tensor | None  # float32; before they are multiplied


def prepare(x_TI: torch.Tensor, inputs: Inputs) -> Prepared:
    x_TI = x_TI.contiguous()
    changed = inputs.source_P is not None or inputs.activations is not None
    if not changed and inputs.unit is None:
        return Prepared(x_TI, None, None)
    rows, places, device = len(x_TI), inputs.places, x_TI.device
    out_TP = torch.empty(rows, places, dtype=x_TI.dtype, device=device) if changed else x_TI
    factors_T = sums_TU = None
    if inputs.activations is not None:
        factors_T = torch.empty(rows, dtype=torch.float32, device=device)
    if inputs.unit is not None:
        units = -(-places // inputs.unit)
        sums_TU = torch.empty(rows, units, dtype=torch.float32, device=device)
    _prepare_inputs[(rows,)](
        out_TP,
        x_TI if factors_T is None else factors_T,
        x_TI if sums_TU is None else sums_TU,
        x_TI,
        x_TI if inputs.source_P is None else inputs.source_P,
        inputs.input_scale or 1.0,
        INPUTS=inputs.size,
        PLACES=places,
        UNIT=inputs.unit or 0,
        ACTIVATIONS=inputs.activations or "",
        STATIC=inputs.input_scale is not None,
        HAS_SOURCE=inputs.source_P is not None,
        CHANGED=changed,
        C=PLACES_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return Prepared(out_TP, factors_T, sums_TU)


@triton.jit
def _rounded(value_C: tl.tensor, ACTIVATIONS: tl.constexpr) -> tl.tensor:
    """The nearest of these numbers, the even one of two. A sum with a large number rounds."""
    if ACTIVATIONS == "int8":
        value_C = tl.minimum(tl.maximum(value_C, -128.0), 127.0)
        value_C = (value_C + 12582912.0) - 12582912.0  # 1.5 * 2^23
    else:
        value_C = tl.minimum(tl.maximum(value_C, -448.0), 448.0)
        # Numbers of E4M3 have 3 bits after the first, and below 2^-6 are multiples of 2^-9.
        bits_C = value_C.to(tl.uint32, bitcast=True)
        bits_C = (bits_C + 0x7FFFF + ((bits_C >> 20) & 1)) & 0xFFF00000
        small_C = (value_C + 24576.0) - 24576.0  # 1.5 * 2^14
        large_C = bits_C.to(tl.float32, bitcast=True)
        value_C = tl.where(tl.abs(value_C) < 0.015625, small_C, large_C)
    return value_C


@triton.jit
def _prepare_inputs(
    out_TP: tl.tensor,
    factors_T: tl.tensor,
    sums_TU: tl.tensor,
    x_TI: tl.tensor,
    source_P: tl.tensor,
    given_scale: tl.tensor,
    INPUTS: tl.constexpr,
    PLACES: tl.constexpr,
    UNIT: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    STATIC: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    CHANGED: tl.constexpr,
    C: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_I = x_TI + row * INPUTS
    place_C = tl.arange(0, C)
    scale = given_scale
    if ACTIVATIONS != "":
        if not STATIC:
            most_C = tl.zeros([C], tl.float32)
            for begin in range(0, INPUTS, C):
                at_C = begin + place_C
                value_C = tl.load(x_I + at_C, mask=at_C < INPUTS, other=0.0).to(tl.float32)
                most_C = tl.maximum(most_C, tl.abs(value_C))
            largest: tl.constexpr = 127.0 if ACTIVATIONS == "int8" else 448.0
            scale = tl.div_rn(tl.max(most_C, 0), largest)
            scale = tl.where(scale == 0.0, 1.0, scale)
        tl.store(factors_T + row, scale)
    for begin in range(0, PLACES, C):
        at_C = begin + place_C
        live_C = at_C < PLACES
        from_C = at_C
        if HAS_SOURCE:
            from_C = tl.load(source_P + at_C, mask=live_C, other=-1)
        value_C = tl.load(x_I + from_C, mask=live_C & (from_C >= 0), other=0.0).to(tl.float32)
        if ACTIVATIONS != "":
            value_C = _rounded(tl.div_rn(value_C, scale + tl.zeros([C], tl.float32)), ACTIVATIONS)
        if CHANGED:
            out_C = out_TP + row * PLACES + at_C
            tl.store(out_C, value_C.to(out_TP.dtype.element_ty), mask=live_C)
        if UNIT:
            units: tl.constexpr = (PLACES + UNIT - 1) // UNIT
            unit_U = begin // UNIT + tl.arange(0, C // UNIT)
            sum_U = tl.sum(tl.reshape(value_C, [C // UNIT, UNIT]), 1)
            tl.store(sums_TU + row * units + unit_U, sum_U, mask=unit_U < units)
