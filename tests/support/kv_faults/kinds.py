"""The kinds of KV that a testbed's nodes exchange: a simulated engine's, or those of a tiny model.

In: SimSettings or a TinyEngine. Out: an EngineCore, and its KV layout. The tiny models' KV is read
and written in place, a simulated engine's through buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.core.engine_core import EngineCore
from baton_engine.memory.requirements import groups_of, layout_of
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.layout import KVLayout
from tests.support.engines.tiny_models import make_tiny_model, with_other_weights


@dataclass(frozen=True, kw_only=True)
class TinyEngine:
    """An engine of a tiny model in float32 on one thread. `num_blocks` is per group of layers.
    With `other_weights`, the same tokens have other KV."""

    model: str
    num_blocks: int = 96
    max_batched_tokens: int = 32
    other_weights: bool = False

    def settings(self) -> TorchSettings:
        folder = self._folder()
        groups = max(1, len(groups_of(read_config(folder), "float32")))
        return TorchSettings(
            model=folder,
            dtype="float32",
            threads=1,
            kv_blocks=self.num_blocks * groups,
            chunk_blocks=1,
            max_batched_tokens=self.max_batched_tokens,
        )

    def layout(self) -> KVLayout:
        settings = self.settings()
        return layout_of(settings, read_config(settings.model))

    def _folder(self) -> Path:
        folder = make_tiny_model(self.model)
        return with_other_weights(folder) if self.other_weights else folder


EngineSettings: TypeAlias = SimSettings | TinyEngine

KINDS: Mapping[str, TinyEngine] = {
    "K and V": TinyEngine(model="llama-gqa4"),
    "windows": TinyEngine(model="mistral-window"),
    "values shorter than keys": TinyEngine(model="minicpm3"),
    "latent rows": TinyEngine(model="deepseek-v3"),
    "sinks and windows": TinyEngine(model="gpt-oss"),
}


def build_engine(settings: EngineSettings) -> EngineCore:
    if isinstance(settings, SimSettings):
        return build_sim(settings)
    # A simulated engine needs no torch.
    from baton_engine.build import build_torch

    return build_torch(settings.settings())
