"""Builds a bench's engine in this process.

In: BenchOptions. Out: an EngineCore, or a CommandError of one line. torch and the node's package
are imported only if the chosen engine needs them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baton_cli.bench.options import BenchOptions
from baton_cli.errors import CommandError, UsageError
from baton_cli.models.local_folder import find_model

if TYPE_CHECKING:
    from baton_engine.core.engine_core import EngineCore
    from baton_text.tokenizer import Tokenizer

DEMO = "demo"


def find_folder(options: BenchOptions) -> Path | None:
    """Return the model's folder, None for a simulated engine without a model."""
    if options.load_format == "dummy":
        return _dummy_folder(options)
    if options.model == DEMO:
        return demo_folder()
    if options.engine == "sim" and not options.model:
        return None
    return find_model(options.model, weights=options.engine == "torch").path


def build(options: BenchOptions, folder: Path | None) -> EngineCore:
    try:
        return _build_sim(options, folder) if options.engine == "sim" else _build(options, folder)
    except ImportError as error:
        raise CommandError(
            f"the engine cannot be loaded ({error}); pip install '.[node]' in the checkout"
        ) from error
    except MemoryError as error:
        raise CommandError("not enough memory for the engine; lower --kv-memory") from error


def read_tokenizer(folder: Path | None) -> Tokenizer:
    """Read the model's tokenizer; without a folder, use the byte tokenizer of the sim engine."""
    from baton_text.artifacts import ArtifactError, byte_artifacts, read_artifacts
    from baton_text.tokenizer import Tokenizer

    try:
        return Tokenizer.from_artifacts(read_artifacts(folder) if folder else byte_artifacts())
    except ArtifactError as error:
        raise CommandError(str(error)) from error


def _dummy_folder(options: BenchOptions) -> Path:
    if options.engine == "sim":
        raise UsageError("--load-format dummy is for --engine torch; sim reads no weights")
    folder = Path(options.model).expanduser()
    if not options.model or not (folder / "config.json").is_file():
        raise CommandError(
            f"--model {options.model or 'is missing'}: --load-format dummy needs a folder that"
            " holds config.json"
        )
    return folder


def demo_folder() -> Path:
    from baton_cli.models import demo_model

    try:
        return demo_model.fetch_demo(None, lambda line: print(line, file=sys.stderr, flush=True))
    except demo_model.DemoModelError as error:
        raise CommandError(str(error)) from error


def _build(options: BenchOptions, folder: Path | None) -> EngineCore:
    from baton_engine.build import build_torch
    from baton_engine.config.engine_config import TorchSettings
    from baton_engine.errors import EngineError

    assert folder is not None, "only the sim engine needs no model"
    try:
        return build_torch(TorchSettings.of(options, folder, load_format=options.load_format))
    except EngineError as error:
        raise CommandError(str(error)) from error


def _build_sim(options: BenchOptions, folder: Path | None) -> EngineCore:
    from baton_node.engine.build_engine import build_engine
    from baton_node.errors import SetupError
    from baton_node.settings import NodeSettings

    settings = NodeSettings(
        node="bench",
        role="decode",
        engine="sim",
        model=str(folder or ""),
        **options.engine_options(),
        sim=options.sim,
    )
    try:
        return build_engine(settings)
    except SetupError as error:
        raise CommandError(str(error)) from error
