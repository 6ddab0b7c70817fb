"""From what --model says to a folder on this machine.

In: a folder, or a hub id such as Qwen/Qwen3-0.6B. Out: the folder and the model's name for clients.
A hub that cannot be reached is said within seconds; what it gave before is used without it.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_cli.errors import CommandError

HUB_TIMEOUT_S = 5.0
# Weights in other formats (pickles, GGUF, ONNX) are not read, so they are not fetched.
SMALL_FILES = ("*.json", "*.jinja", "LICENSE*")
HUB_FILES = (*SMALL_FILES, "*.safetensors")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class ModelFolder:
    """`name` is what clients call the model unless --served-model-name says otherwise."""

    path: Path
    name: str


def find_model(model: str, *, weights: bool = True) -> ModelFolder:
    """The folder behind --model; raise CommandError in one line. `weights` False (the sim engine)
    asks for a tokenizer only."""
    if not model:
        raise CommandError(
            "--model is missing: give a Hugging Face folder; `baton model fetch-demo` makes one"
        )
    path = Path(model).expanduser()
    if path.is_dir():
        path = path.resolve()
        _check_folder(path, weights)
        return ModelFolder(path, path.name)
    if path.exists():
        raise CommandError(f"--model {model} is a file; give the folder that holds config.json")
    if not _HUB_ID.fullmatch(model):
        raise CommandError(f"--model {model}: there is no such folder")
    path = _from_hub(model)
    _check_folder(path, weights)
    return ModelFolder(path, model)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is; {} where there is none (the sim engine needs none)."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{path} holds no JSON object")
    return config


def _check_folder(folder: Path, weights: bool) -> None:
    _check_readable(folder, os.R_OK | os.X_OK)
    needed = ["tokenizer.json"]
    if weights:
        needed.insert(0, "config.json")
    for name in needed:
        if not (folder / name).is_file():
            raise CommandError(f"--model {folder} is no model folder: it holds no {name}")
    tensors = list(folder.glob("*.safetensors")) if weights else []
    if weights and not tensors:
        raise CommandError(f"--model {folder} is no model folder: it holds no *.safetensors")
    for file in (*(folder / name for name in needed), *tensors):
        _check_readable(file, os.R_OK)
    read_config(folder)


def _check_readable(path: Path, mode: int) -> None:
    """In a pod the files may be another user's; the engine would say so much later."""
    if not os.access(path, mode, effective_ids=True):
        raise CommandError(
            f"--model: user {os.geteuid()} may not read {path}; chmod -R a+rX makes it readable"
        )


def _from_hub(model: str) -> Path:
    """Fetch (or find in the hub's cache) and return the snapshot's folder."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise CommandError(
            f"--model {model}: there is no such folder, and fetching needs huggingface_hub"
            " (pip install 'baton-serve[serve]')"
        ) from error
    if constants.HF_HUB_OFFLINE:
        problem = "HF_HUB_OFFLINE is set"
    else:
        problem = _unreachable(constants.ENDPOINT, model)
    try:
        found = snapshot_download(
            model,
            allow_patterns=list(HUB_FILES),
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=bool(problem),
        )
    except Exception as error:  # whatever the hub's client raises, the user gets one line
        reason = problem or " ".join(str(error).split())[:200]
        raise CommandError(
            f"--model {model}: there is no such folder, and {constants.ENDPOINT} did not give it:"
            f" {reason}"
        ) from error
    return Path(found)


def _unreachable(endpoint: str, model: str) -> str:
    """Why the hub does not answer, or "". Its own client retries for minutes."""
    try:
        with urllib.request.urlopen(f"{endpoint}/api/models/{model}", timeout=HUB_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as answer:
        answer.close()
        return ""  # it answered; its client words a refusal better
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
