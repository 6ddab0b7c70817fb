"""Quantized weights in the tensors of bitsandbytes.

int8 has `weight` int8 [O, I] and `SCB` [O], the largest number of each row, for which 127 stands.

NF4 has `weight` uint8 [O * I / 2, 1], with two codes in each byte, the first in the high half, and
`weight.absmax` [O * G], a scale for each 64 numbers in the order of rows. With double quantization,
`weight.absmax` is uint8: codes of the numbers `weight.nested_quant_map` [256], with a scale for
each 256 of them in `weight.nested_absmax`, and an offset. The offset is in a JSON text.

Shapes: O and I a linear's output and input size, G groups of inputs, J bytes of a row's codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from baton_engine.config.config_json import shown
from baton_engine.config.quantization.bitsandbytes import GROUP
from baton_engine.errors import UnsupportedModel, WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import TABLES, QuantizedWeight
from baton_engine.layers.quantization.weight_format import WeightFormat

INT8_MOST = 127
# Rows one after the other. Other formats are those of some GPUs.
ROWS = 0
NESTED_GROUP = 256
NESTED_NUMBERS = 256
STATE = "weight.quant_state.bitsandbytes__nf4"
MOST_STATE = 4096  # bytes
# Of dummy weights.
USUAL = 0.05
USUAL_STATE = b'{"nested_offset": 0.05}'


class Int8(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        codes_OI = slots.tensor(f"{name}.weight", outputs, inputs, dtype=torch.int8)
        largest_O = slots.tensor(f"{name}.SCB", outputs, dtype=torch.float32, usual=USUAL)
        order = slots.tensor(f"{name}.weight_format", 1, dtype=torch.uint8, default=ROWS)

        def finish() -> QuantizedWeight:
            if int(order) != ROWS:
                raise WeightsError(f"{name}.weight_format is {int(order)}; supported: {ROWS}")
            scales_OG = (largest_O / INT8_MOST)[:, None]
            return QuantizedWeight(self._scheme.numbers, codes_OI, scales_OG, inputs, inputs)

        return finish


class Nf4(WeightFormat):
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        if inputs % GROUP:
            raise UnsupportedModel(
                f"{name}.weight: NF4 of bitsandbytes with {inputs} inputs is not supported: "
                f"blocks of {GROUP} numbers would be parts of two rows. Supported: multiples of "
                f"{GROUP}"
            )
        groups = inputs // GROUP
        octets = slots.tensor(f"{name}.weight", outputs * inputs // 2, 1, dtype=torch.uint8)
        scales_of = self._scales(slots, name, outputs * groups)
        usual = torch.tensor(TABLES["nf4"])
        table = slots.tensor(f"{name}.weight.quant_map", 16, dtype=torch.float32, usual=usual)
        state = slots.octets(f"{name}.{STATE}", MOST_STATE, USUAL_STATE)

        def finish() -> QuantizedWeight:
            numbers = torch.tensor(TABLES["nf4"], device=table.device)
            if not torch.allclose(table, numbers, atol=1e-6):
                raise WeightsError(f"{name}.weight.quant_map has other numbers than those of NF4")
            fields = _fields(state, f"{name}.{STATE}")
            codes_OJ = octets.view(outputs, -1)
            codes_OJ = codes_OJ >> 4 | codes_OJ << 4
            scales_OG = scales_of(fields).view(outputs, groups)
            return QuantizedWeight(self._scheme.numbers, codes_OJ, scales_OG, GROUP, inputs)

        return finish

    def _scales(
        self, slots: WeightSlots, name: str, count: int
    ) -> Callable[[dict[str, Any]], torch.Tensor]:
        """The function that makes the scales of what the JSON text has."""
        scales = slots.tensor(f"{name}.weight.absmax", count, dtype=torch.float32, usual=USUAL)
        return lambda fields: scales


class Nf4Double(Nf4):
    def _scales(
        self, slots: WeightSlots, name: str, count: int
    ) -> Callable[[dict[str, Any]], torch.Tensor]:
        here = f"{name}.weight"
        codes = slots.tensor(f"{here}.absmax", count, dtype=torch.uint8)
        nested_groups = -(-count // NESTED_GROUP)
        nested = slots.tensor(
            f"{here}.nested_absmax", nested_groups, dtype=torch.float32, usual=USUAL
        )
        numbers = slots.tensor(
            f"{here}.nested_quant_map", NESTED_NUMBERS, dtype=torch.float32, usual=USUAL
        )

        def scales(fields: dict[str, Any]) -> torch.Tensor:
            offset = fields.get("nested_offset")
            if not isinstance(offset, float):
                raise WeightsError(
                    f"{name}.{STATE}: nested_offset is {shown(offset)}; expected a number"
                )
            return numbers[codes.long()] * nested.repeat_interleave(NESTED_GROUP)[:count] + offset

        return scales


def _fields(state: torch.Tensor, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(state.tolist()).rstrip(b"\0"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{name} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WeightsError(f"{name} is {shown(fields)}; expected an object")
    return fields
