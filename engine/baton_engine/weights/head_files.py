"""The tensors of a head that drafts from hidden states, and loading them.

In: the head's config. Out: their names, or loaded parameters. Heads of the method "mtp" are in the
target's files.
"""

from __future__ import annotations

from baton_engine.config.head_config import HeadConfig
from baton_engine.errors import WeightsError
from baton_engine.layers.parameter import WeightSlots
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_engine.weights.loader import load_weights

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


def head_names(head: HeadConfig) -> frozenset[str]:
    """The names of its tensors. Raises WeightsError."""
    _refuse_pickles(head)
    return frozenset(
        entry.name
        for path in weight_files(head.folder)
        for entry in read_entries(path)
        if entry.name.startswith(head.prefix)
    )


def load_head(head: HeadConfig, slots: WeightSlots) -> None:
    """Load all of its tensors. Raises WeightsError, which names those that are missing, left over
    or of another shape."""
    load_weights(head.folder, head.layer, slots, prefix=head.prefix)


def _refuse_pickles(head: HeadConfig) -> None:
    for name in PICKLES:
        safe = (head.folder / "model.safetensors").is_file()
        if (head.folder / name).is_file() and not safe:
            raise WeightsError(
                f"{head.folder / name} is a pickle, which may run code; convert it:"
                " safetensors.torch.save_file(torch.load(name, weights_only=True),"
                " 'model.safetensors')"
            )
