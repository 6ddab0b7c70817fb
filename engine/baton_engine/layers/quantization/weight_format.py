"""How the quantized weight of a linear layer is in a checkpoint: its tensors, and what becomes of
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from baton_engine.config.quantization.gguf import SCHEMES as GGUF_SCHEMES
from baton_engine.config.quantization.scheme import WeightScheme
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight

if TYPE_CHECKING:
    from baton_engine.layers.parameter import WeightSlots

# WeightScheme.layout -> the WeightFormat, a class that a scheme makes, "module:class".
LAYOUTS: Mapping[str, str] = {
    "awq gemm": "baton_engine.layers.quantization.awq:Awq",
    "compressed-tensors float-quantized": "baton_engine.layers.quantization.fp8:ScaledFp8",
    "bitsandbytes int8": "baton_engine.layers.quantization.bitsandbytes:Int8",
    "bitsandbytes nf4": "baton_engine.layers.quantization.bitsandbytes:Nf4",
    "bitsandbytes nf4 double": "baton_engine.layers.quantization.bitsandbytes:Nf4Double",
    "compressed-tensors mxfp4-pack-quantized": "baton_engine.layers.quantization.fp4:Mxfp4",
    "compressed-tensors nvfp4-pack-quantized": "baton_engine.layers.quantization.fp4:Nvfp4",
    "modelopt fp8": "baton_engine.layers.quantization.fp8:ScaledFp8",
    "modelopt nvfp4": "baton_engine.layers.quantization.fp4:ModeloptNvfp4",
    "fp8": "baton_engine.layers.quantization.fp8:Fp8",
    "gptq": "baton_engine.layers.quantization.gptq:Gptq",
    "gptq_v2": "baton_engine.layers.quantization.gptq:GptqV2",
    "compressed-tensors pack-quantized": (
        "baton_engine.layers.quantization.compressed_tensors:PackQuantized"
    ),
    "compressed-tensors int-quantized": (
        "baton_engine.layers.quantization.compressed_tensors:IntQuantized"
    ),
    "online": "baton_engine.layers.quantization.online:Online",
    **{
        scheme.layout: "baton_engine.layers.quantization.gguf:Gguf"
        for scheme in GGUF_SCHEMES.values()
    },
}


class WeightFormat(ABC):
    # Whether the checkpoint's tensors are those of plain weights.
    plain_tensors = False

    def __init__(self, scheme: WeightScheme) -> None:
        self._scheme = scheme

    @abstractmethod
    def declare(
        self, slots: WeightSlots, name: str, outputs: int, inputs: int
    ) -> Callable[[], QuantizedWeight]:
        """Declare the checkpoint's tensors of the layer `name`. The result makes the weight of
        them, once they are loaded, and may overwrite them."""


def format_of(scheme: WeightScheme) -> WeightFormat:
    module, name = LAYOUTS[scheme.layout].split(":")
    made: WeightFormat = getattr(import_module(module), name)(scheme)
    return made
