"""Load a model's weights from safetensors files. Every slot needs a tensor, and every tensor a
slot.

In: the folder and the slots that a model declared. Out: filled slots, or a WeightsError that names
the tensors that are missing, left over or of the wrong shape. Rotary buffers and a tied model's
copy of the embedding are optional. A tied head that differs from the embedding is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import safe_open

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.weights.safetensors_files import ignorable, read_entries, weight_files

HEAD_NAME = "lm_head.weight"
EMBED_NAME = "model.embed_tokens.weight"
NAMES_SHOWN = 5


def load_weights(
    folder: Path,
    config: ModelConfig,
    slots: WeightSlots,
    progress: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy every tensor of the checkpoint into its slot, converted to the slots' dtype. Calls
    `progress` with the size in bytes of each loaded tensor in its file. Raises WeightsError."""
    owner: dict[str, Path] = {}
    for path in weight_files(folder):
        for entry in read_entries(path):
            if entry.name in owner:
                raise WeightsError(f"{entry.name} is in {owner[entry.name].name} and {path.name}")
            owner[entry.name] = path
            slot = slots.views.get(entry.name)
            if slot is not None and tuple(slot.shape) != entry.shape:
                raise WeightsError(
                    f"{entry.name} has shape {list(entry.shape)}; "
                    f"the config asks for {list(slot.shape)}"
                )
    _refuse(slots.views.keys() - owner.keys(), f"{folder} lacks")
    left_over = {name for name in owner.keys() - slots.views.keys() if not ignorable(name, config)}
    _refuse(left_over, f"{folder} holds tensors that {config.architecture} has no use for:")
    for path in sorted(set(owner.values())):
        _fill(path, slots, {name for name, where in owner.items() if where == path}, progress)
    if config.tied and HEAD_NAME in owner:
        _check_tie(owner[HEAD_NAME], slots.views[EMBED_NAME])


def _fill(
    path: Path, slots: WeightSlots, names: Collection[str], progress: Callable[[int], None]
) -> None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        for name in names:
            slot = slots.views.get(name)
            if slot is not None:
                tensor = file.get_tensor(name)
                slot.copy_(tensor)
                progress(tensor.nbytes)


def _check_tie(path: Path, embed_VD: torch.Tensor) -> None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        head_VD = file.get_tensor(HEAD_NAME).to(embed_VD)
    if not torch.equal(head_VD, embed_VD):
        raise WeightsError(
            f"{HEAD_NAME} differs from {EMBED_NAME} although tie_word_embeddings is true"
        )


def _refuse(names: Collection[str], complaint: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:NAMES_SHOWN])
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        raise WeightsError(f"{complaint} {shown}{more}")
