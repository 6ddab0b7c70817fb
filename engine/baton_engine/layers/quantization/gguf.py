"""Quantized weights in the tensors of GGUF files.

A row is a sequence of blocks, and a block has the codes of successive inputs and their scales. A
type without shifts stands for code * scale, one with shifts for code * scale + shift. Types with a
K have blocks of 256 inputs, whose groups have small integers that are multiplied by one or two
numbers of the block.

Shapes: O and I a linear's output and input size, R rows at a time, B blocks of a row, Y bytes of a
block, S inputs of a block, G groups of inputs of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from baton_engine.config.quantization.gguf import LAYOUT
from baton_engine.config.quantization.scheme import BITS
from baton_engine.layers.parameter import Parameter, WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, packed_halves
from baton_engine.layers.quantization.weight_format import WeightFormat
from baton_text.gguf.header import TYPES, TensorType

BY_NAME: Mapping[str, TensorType] = {kind.name: kind for kind in TYPES.values()}
INT4_ZERO = 8  # the code of the number 0
# What dummy weights have.
USUAL_SCALE = 0.005

# Codes [R, B, S] of the numbers in memory; scales, and shifts if the type has them, [R, B, groups].
Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockParameter(Parameter):
    """A tensor of blocks of the type `kind`, which become the quantized `weight`. `place` has its
    codes."""

    weight: QuantizedWeight | None = None
    kind: str = ""

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.kind,)

    def load(self, tensor: torch.Tensor) -> None:
        self.load_rows(0, tensor)

    def load_rows(self, begin: int, octets_RY: torch.Tensor) -> None:
        """Store the rows from `begin` on, of which the file has these bytes, uint8."""
        weight = self.weight
        assert weight is not None, "no place for a weight"
        size = BY_NAME[self.kind].size
        rows = slice(begin, begin + len(octets_RY))
        octets_RBY = octets_RY.to(weight.codes_OJ.device).view(len(octets_RY), -1, size)
        codes_RBS, scales, shifts = BLOCKS[self.kind](octets_RBY)
        codes_RI = codes_RBS.flatten(1)
        if BITS[weight.numbers] == 4:
            codes_RI = packed_halves(codes_RI)
        weight.codes_OJ[rows] = codes_RI.view(weight.codes_OJ.dtype)
        weight.scales_OG[rows] = scales.flatten(1)
        if weight.shifts_OG is not None:
            assert shifts is not None, "a type without shifts"
            weight.shifts_OG[rows] = shifts.flatten(1)


class Gguf(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        scheme = self._scheme
        group, bits = scheme.group(inputs), BITS[scheme.numbers]
        codes_OJ = torch.empty(
            outputs,
            -(-inputs * bits // 8),
            dtype=torch.uint8 if bits == 4 else torch.int8,
            device=slots.device,
        )
        scales_OG = torch.full((outputs, -(-inputs // group)), USUAL_SCALE, device=slots.device)
        shifts_OG = torch.zeros_like(scales_OG) if scheme.shifted else None
        weight = QuantizedWeight(scheme.numbers, codes_OJ, scales_OG, group, inputs, shifts_OG)
        slots.declare(
            f"{name}.weight",
            BlockParameter(
                codes_OJ,
                whole=(outputs, inputs),
                weight=weight,
                kind=scheme.layout.removeprefix(LAYOUT),
            ),
        )
        return lambda: weight


def _float16(octets_RBY: torch.Tensor, at: int) -> torch.Tensor:
    """The number at this byte of each block, float32 [R, B, 1]."""
    return octets_RBY[..., at : at + 2].contiguous().view(torch.float16).float()


def _halves(octets_RBY: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then their high halves."""
    return torch.cat((octets_RBY & 15, octets_RBY >> 4), -1)


def _bits(octets_RBY: torch.Tensor) -> torch.Tensor:
    """The bits of all bytes, each from the lowest on."""
    places = torch.arange(8, dtype=torch.uint8, device=octets_RBY.device)
    return (octets_RBY[..., None] >> places & 1).flatten(-2)


def _signed(codes: torch.Tensor, zero: int) -> torch.Tensor:
    """int8 numbers of codes whose number 0 is `zero`."""
    return codes.view(torch.int8) - zero


def _q4_0(octets_RBY: torch.Tensor) -> Blocks:
    return _halves(octets_RBY[..., 2:]), _float16(octets_RBY, 0), None


def _q4_1(octets_RBY: torch.Tensor) -> Blocks:
    scales, least = _float16(octets_RBY, 0), _float16(octets_RBY, 2)
    return _halves(octets_RBY[..., 4:]), scales, least + INT4_ZERO * scales


def _q5_0(octets_RBY: torch.Tensor) -> Blocks:
    codes = _halves(octets_RBY[..., 6:]) | _bits(octets_RBY[..., 2:6]) << 4
    return _signed(codes, 16), _float16(octets_RBY, 0), None


def _q5_1(octets_RBY: torch.Tensor) -> Blocks:
    codes = _halves(octets_RBY[..., 8:]) | _bits(octets_RBY[..., 4:8]) << 4
    return codes, _float16(octets_RBY, 0), _float16(octets_RBY, 2)


def _q8_0(octets_RBY: torch.Tensor) -> Blocks:
    return octets_RBY[..., 2:], _float16(octets_RBY, 0), None


def _pieces(octets_RBY: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """Of each `size` successive bytes the lowest `bits` of all, then the next bits, and so on."""
    pieces = octets_RBY.reshape(*octets_RBY.shape[:-1], -1, 1, size)
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets_RBY.device)
    codes: torch.Tensor = pieces >> places[:, None] & (1 << bits) - 1
    return codes.flatten(-3)


def _q2_k(octets_RBY: torch.Tensor) -> Blocks:
    parts, codes = octets_RBY[..., :16], _pieces(octets_RBY[..., 16:80], 32, 2)
    scales = _float16(octets_RBY, 80) * (parts & 15)
    least = _float16(octets_RBY, 82) * (parts >> 4)
    return codes, scales, INT4_ZERO * scales - least


def _q3_k(octets_RBY: torch.Tensor) -> Blocks:
    # The third bits are in the same order as the others, with one bit of each byte per 32 inputs.
    third = _pieces(octets_RBY[..., :32], 32, 1)
    codes = _pieces(octets_RBY[..., 32:96], 32, 2) | third << 2
    low, high = _halves(octets_RBY[..., 96:104]), _pieces(octets_RBY[..., 104:108], 4, 2)
    parts = _signed(low | high << 4, 32)
    # Numbers are from -4 to 3.
    return codes + (INT4_ZERO - 4), _float16(octets_RBY, 108) * parts, None


def _scales_and_minimums(octets_RBY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K, [R, B, 8] each: integers of 6 bits in 12 bytes, times a number of the
    block."""
    first, second, last = (octets_RBY[..., at : at + 4] for at in (4, 8, 12))
    parts = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    least = torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)
    return _float16(octets_RBY, 0) * parts, _float16(octets_RBY, 2) * least


def _q4_k(octets_RBY: torch.Tensor) -> Blocks:
    scales, least = _scales_and_minimums(octets_RBY)
    return _pieces(octets_RBY[..., 16:], 32, 4), scales, INT4_ZERO * scales - least


def _q5_k(octets_RBY: torch.Tensor) -> Blocks:
    scales, least = _scales_and_minimums(octets_RBY)
    fifth = _pieces(octets_RBY[..., 16:48], 32, 1)
    return _pieces(octets_RBY[..., 48:], 32, 4) | fifth << 4, scales, -least


def _q6_k(octets_RBY: torch.Tensor) -> Blocks:
    low = _pieces(octets_RBY[..., :128], 64, 4)
    codes = low | _pieces(octets_RBY[..., 128:192], 32, 2) << 4
    parts = octets_RBY[..., 192:208].view(torch.int8)
    return _signed(codes, 32), _float16(octets_RBY, 208) * parts, None


BLOCKS: Mapping[str, Callable[[torch.Tensor], Blocks]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
