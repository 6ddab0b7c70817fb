"""Builds the engine from NodeSettings, in the engine process.

In: settings. Out: an EngineCore. torch is imported only for the torch engine.
Raises SetupError for mistakes that the user can correct.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from baton_engine.config.engine_config import TorchSettings
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import EngineError
from baton_engine.sim.build import SimSettings, build_sim
from baton_node.errors import SetupError
from baton_node.settings import NodeSettings
from baton_text.artifacts import ArtifactError, read_artifacts
from baton_text.tokenizer import Tokenizer


def build_engine(settings: NodeSettings) -> EngineCore:
    """Build the engine that the settings name. Raise SetupError, with one line for the user, if it
    cannot be built."""
    try:
        if settings.engine == "sim":
            return build_sim(_sim_settings(settings))
        # The node's only import of torch, in the only process that needs it.
        from baton_engine.build import build_torch

        return build_torch(torch_settings(settings))
    except (EngineError, ArtifactError) as error:
        raise SetupError(str(error)) from error
    except ImportError as error:
        raise SetupError(
            f"the torch engine needs {error.name}: pip install '.[node]' in the checkout"
        ) from error
    except MemoryError as error:
        raise SetupError(
            "the machine has not enough memory for the engine: use a smaller --kv-memory"
        ) from error


def torch_settings(settings: NodeSettings) -> TorchSettings:
    """Return the torch engine's part of the settings. If kv_blocks is set, kv_memory is ignored."""
    if settings.kv_blocks is not None:
        settings = replace(settings, kv_memory=None)
    return TorchSettings.of(
        *(settings, Path(settings.model)),
        name=settings.model_name(),
        load_format=settings.load_format,
    )


def _sim_settings(settings: NodeSettings) -> SimSettings:
    name = settings.model_name()
    if not settings.model:
        return SimSettings.of(settings, settings.sim, model=name)
    tokenizer = Tokenizer.from_artifacts(read_artifacts(Path(settings.model)))
    return SimSettings.of(
        *(settings, settings.sim),
        model=name,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
    )
