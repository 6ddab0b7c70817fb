"""Resolves --model for a command: `baton_engine.config.model_folder`, with the command's errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton_cli.errors import CommandError
from baton_engine.config import model_folder
from baton_engine.config.model_folder import ModelFolder
from baton_engine.errors import ModelError


def find_model(model: str, *, weights: bool = True) -> ModelFolder:
    """Resolve --model and check its content; raise CommandError. With `weights` False (the sim
    engine) the folder needs only a tokenizer."""
    try:
        return model_folder.find_model(model, weights=weights)
    except ModelError as error:
        raise CommandError(str(error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, {} without the file; raise CommandError if it is wrong."""
    try:
        return model_folder.read_config(folder)
    except ModelError as error:
        raise CommandError(str(error)) from error
