"""Plain weights that are quantized while they are loaded, by --quantization.

A tensor of the checkpoint is quantized as soon as it is read, some rows at a time, so the model is
never in memory as plain weights. All operations are on single numbers, with the rounding of IEEE
754, or the largest and the smallest of a group: every device gives the same codes.

Shapes: O and I a linear's output and input size, G groups of inputs, R rows at a time, S inputs of
a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton_engine.config.quantization.scheme import BITS, Numbers, WeightScheme
from baton_engine.layers.parameter import Parameter, WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, packed_halves
from baton_engine.layers.quantization.weight_format import WeightFormat

# Numbers that are quantized at a time; they take some ten times as many bytes.
AT_ONCE = 1 << 21
CODE_DTYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The largest code of symmetric numbers.
LARGEST = {"int8": 127.0, "fp8": 448.0}
INT4_STEPS = 15
INT4_ZERO = 8  # the code of the number 0


@dataclass(frozen=True, slots=True)
class QuantizedParameter(Parameter):
    """A plain tensor of the checkpoint, which becomes the quantized `weight`. `place` has its
    codes."""

    weight: QuantizedWeight | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def load(self, tensor: torch.Tensor) -> None:
        assert self.weight is not None, "no place for a weight"
        quantize_into(self.weight, tensor.view(self.shape))


@dataclass(frozen=True, slots=True)
class SplitParameter(Parameter):
    """A tensor of the checkpoint whose rows, of all its leading dimensions, fill several `parts`
    one after the other. `place` is that of the first."""

    parts: Sequence[Parameter] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def load(self, tensor: torch.Tensor) -> None:
        rows = tensor.reshape(-1, tensor.shape[-1])
        pieces = torch.split(rows, [part.shape[0] for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.load(piece)

    @classmethod
    def of(cls, parts: Sequence[Parameter], shape: tuple[int, ...]) -> SplitParameter:
        return cls(parts[0].place, whole=shape, parts=parts)


class Online(WeightFormat):
    plain_tensors = True

    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        weight = empty_weight(self._scheme, outputs, inputs, slots.device)
        parameter = QuantizedParameter(weight.codes_OJ, whole=(outputs, inputs), weight=weight)
        slots.declare(f"{name}.weight", parameter)
        return lambda: weight


def empty_weight(
    scheme: WeightScheme, outputs: int, inputs: int, device: torch.device
) -> QuantizedWeight:
    """A weight [O, I] to quantize into."""
    numbers, group = scheme.numbers, scheme.group(inputs)
    groups, octets = -(-inputs // group), -(-inputs * BITS[numbers] // 8)
    scales_OG = torch.empty(outputs, groups, device=device)
    return QuantizedWeight(
        numbers,
        torch.empty(outputs, octets, dtype=CODE_DTYPES[numbers], device=device),
        *(scales_OG, group, inputs),
        torch.empty_like(scales_OG) if scheme.shifted else None,
    )


def quantized(plain_OI: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """A quantized copy of a plain weight, on its device."""
    outputs, inputs = plain_OI.shape
    weight = empty_weight(scheme, outputs, inputs, plain_OI.device)
    quantize_into(weight, plain_OI)
    return weight


def quantize_into(weight: QuantizedWeight, plain_OI: torch.Tensor) -> None:
    """Quantize plain numbers of any dtype on any device into `weight`."""
    step = max(1, AT_ONCE // weight.inputs)
    for begin in range(0, len(plain_OI), step):
        rows = slice(begin, begin + step)
        plain_RI = plain_OI[rows].to(weight.codes_OJ.device).float()
        plain_RGS = _by_group(plain_RI, weight.group)
        if weight.shifts_OG is None:
            codes, scales = _symmetric(plain_RGS, weight.numbers)
        else:
            codes, scales, shifts = _shifted(plain_RGS)
            weight.shifts_OG[rows] = shifts
        weight.scales_OG[rows] = scales
        codes = codes.flatten(1)[:, : weight.inputs]
        if BITS[weight.numbers] == 4:
            codes = packed_halves(codes.to(torch.uint8))
        weight.codes_OJ[rows] = codes.to(weight.codes_OJ.dtype)


def _by_group(plain_RI: torch.Tensor, group: int) -> torch.Tensor:
    """[R, G, S]; the last input completes the last group."""
    missing = -plain_RI.shape[1] % group
    if missing:
        plain_RI = torch.cat([plain_RI, plain_RI[:, -1:].expand(-1, missing)], 1)
    return plain_RI.view(len(plain_RI), -1, group)


def _symmetric(plain_RGS: torch.Tensor, numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
    largest = LARGEST[numbers]
    scales_RG = plain_RGS.abs().amax(2) / largest
    # A group of zeros, or of numbers too small to divide.
    scales_RG = torch.where(scales_RG > 0, scales_RG, torch.ones_like(scales_RG))
    codes_RGS = plain_RGS / scales_RG[..., None]
    if numbers != "fp8":
        codes_RGS = codes_RGS.round_()
    return codes_RGS.clamp_(-largest, largest), scales_RG


def _shifted(plain_RGS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4-bit codes with scales and shifts, from the smallest to the largest number of a group."""
    low_RG, high_RG = plain_RGS.aminmax(dim=2)
    scales_RG = (high_RG - low_RG) / INT4_STEPS
    some_RG = scales_RG > 0
    divisors_RG = torch.where(some_RG, scales_RG, torch.ones_like(scales_RG))
    codes_RGS = (plain_RGS - low_RG[..., None]).div_(divisors_RG[..., None]).round_()
    codes_RGS = codes_RGS.clamp_(0, INT4_STEPS)
    # A group of equal numbers has their shift alone.
    codes_RGS = torch.where(some_RG[..., None], codes_RGS, INT4_ZERO)
    return codes_RGS, scales_RG, low_RG + scales_RG * INT4_ZERO
