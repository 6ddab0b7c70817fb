"""Random weights in a model's real shapes, to measure speed without a checkpoint.

In: the config, or the parameters that a model declared. Out: digests for the fingerprint, or loaded
parameters. The same config on the same kind of device gives the same weights.
"""

from __future__ import annotations

import torch

from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.online import QuantizedParameter
from baton_engine.memory.estimate import count_weights
from baton_protocol.fingerprint import TensorDigest

SEED = 0
# As in transformers' initialisation: activations stay finite through any number of layers.
STD = 0.02
NORM = "norm.weight"


def dummy_digests(config: ModelConfig, device: str) -> list[TensorDigest]:
    """The digest of dummy weights. No checkpoint has the same one, so dummies and checkpoints never
    exchange KV. `device` is "cpu" or "cuda", which have different random generators."""
    digest = f"seed {SEED} on {device}: {config}"
    return [TensorDigest("dummy", (count_weights(config),), config.dtype, digest)]


def fill_slots(slots: WeightSlots) -> None:
    """Set the factors of norms to 1, biases to 0, and all other weights to N(0, STD^2)."""
    noise = torch.Generator(slots.device).manual_seed(SEED)
    for name, parameter in slots.parameters.items():
        place = parameter.place
        if parameter.optional:
            continue
        if isinstance(parameter, QuantizedParameter):
            plain = torch.empty(parameter.shape, dtype=slots.dtype, device=slots.device)
            parameter.load(plain.normal_(0.0, STD, generator=noise))
        elif parameter.usual is not None:
            place.copy_(torch.as_tensor(parameter.usual))
        elif not place.is_floating_point():
            place.random_(generator=noise)
        elif place.dtype == torch.float8_e4m3fn:
            place.copy_(torch.randn(place.shape, generator=noise, device=place.device))
        elif "scale" in name:
            place.fill_(STD / 4)
        elif name.endswith(NORM):
            place.fill_(1.0)
        elif place.dim() == 1 or name.endswith("bias"):
            place.zero_()
        else:
            place.normal_(0.0, STD, generator=noise)
