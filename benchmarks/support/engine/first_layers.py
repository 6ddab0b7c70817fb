"""A model made of the first layers of another one, to draft for it.

In: a model folder with safetensors. Out: a folder with the same embedding, head and tokenizer, and
fewer layers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

LAYER = re.compile(r"\.layers\.(\d+)\.")
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def first_layers(source: Path, count: int, to: Path) -> Path:
    """Write the model with the first `count` layers to the folder `to`, which must not exist."""
    to.mkdir()
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja") and not path.name.startswith("."):
            shutil.copy(path, to / path.name)
    values = json.loads((source / CONFIG).read_text())
    (to / CONFIG).write_text(json.dumps({**values, "num_hidden_layers": count}))
    with safe_open(str(source / WEIGHTS), framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if _kept(name, count)}  # noqa: SIM118
    save_file(kept, to / WEIGHTS, {"format": "pt"})
    return to


def _kept(name: str, count: int) -> bool:
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) < count
