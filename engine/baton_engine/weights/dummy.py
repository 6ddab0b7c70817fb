"""Random weights in a model's true shapes, so that a shape can be timed without a checkpoint.

In: the config, or the slots a model declared. Out: its identity, filled slots. The same config on
the same kind of device gives the same weights.
"""

from __future__ import annotations

import torch

from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.parameter import WeightSlots
from baton_engine.memory.estimate import count_weights
from baton_protocol.fingerprint import TensorDigest

SEED = 0
# As transformers initialises: activations stay finite through any number of layers.
STD = 0.02
NORM = "norm.weight"


def dummy_digests(config: ModelConfig, device: str) -> list[TensorDigest]:
    """What stands for the tensors' digests: no checkpoint's KV is ever taken for a dummy's.
    `device` is "cpu" or "cuda": each has a random generator of its own."""
    digest = f"seed {SEED} on {device}: {config}"
    return [TensorDigest("dummy", (count_weights(config),), config.dtype, digest)]


def fill_slots(slots: WeightSlots) -> None:
    """Norms are 1, biases 0, everything else is normal."""
    noise = torch.Generator(slots.device).manual_seed(SEED)
    for name, view in slots.views.items():
        if name.endswith(NORM):
            view.fill_(1.0)
        elif view.dim() == 1:
            view.zero_()
        else:
            view.normal_(0.0, STD, generator=noise)
