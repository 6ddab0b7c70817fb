"""Resolves the name of a model to a folder or a file on this machine.

In: a folder, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B. Out: its path and the model's name
for clients. Raises ModelError, with one line for the user.
If the hub is unreachable, its local cache is used; without a cached copy, the error comes within
seconds.
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

from baton_engine.errors import ModelError
from baton_protocol.model_source import name_of_path
from baton_text.gguf.config import config_of
from baton_text.gguf.header import GgufError, is_gguf, read_header

HUB_TIMEOUT_S = 5.0
# No weights in other formats: the engine reads no pickles and no ONNX, and of GGUF files a
# repository has many, of which one is enough.
SMALL_FILES = ("*.json", "*.jinja", "LICENSE*")
HUB_FILES = (*SMALL_FILES, "*.safetensors")

# What to do about a folder that lacks files.
FETCH_AGAIN = "fetch the whole model (baton model fetch hf://ORG/NAME --to DIR)"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class ModelFolder:
    """`path` is a folder, or a GGUF file. `name` is the model's name for clients unless
    --served-model-name sets another."""

    path: Path
    name: str


def find_model(model: str, *, weights: bool = True) -> ModelFolder:
    """Resolve --model and check its content. With `weights` False (the sim engine) the folder needs
    only a tokenizer."""
    if not model:
        raise ModelError(
            "--model is missing: give a Hugging Face folder; `baton model fetch-demo` makes one"
        )
    found = locate_model(model)
    if is_gguf(found.path):
        _check_readable(found.path, os.R_OK)
        read_config(found.path)
    else:
        _check_folder(found.path, weights)
    return found


def locate_model(model: str, revision: str = "", *, option: str = "--model") -> ModelFolder:
    """Resolve the name of a model, without a look at its content. `revision` is a branch, a tag or
    a commit of the hub's repository; "" is its main branch. `option` is where the user gave the
    name."""
    path = Path(model).expanduser()
    if path.exists() and revision:
        raise ModelError(
            f"{option} {model} is on this machine, and only a hub's model has revisions: leave out "
            f"revision {revision}"
        )
    if path.is_dir():
        path = path.resolve()
        return ModelFolder(path, path.name)
    if is_gguf(path):
        path = path.absolute()
        return ModelFolder(path, name_of_path(path.name))
    if path.exists():
        raise ModelError(
            f"{option} {model} is a file; give the folder that holds config.json, or a file *.gguf"
        )
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"{option} {model}: the folder does not exist")
    return ModelFolder(_from_hub(model, revision, option), model)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json, {} without the file (the sim engine needs none); of a GGUF
    file, what config.json would say. Raise ModelError if it is not a JSON object."""
    if is_gguf(folder):
        try:
            return config_of(read_header(folder))
        except GgufError as error:
            raise ModelError(f"--model {error}") from error
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def _check_folder(folder: Path, weights: bool) -> None:
    _check_readable(folder, os.R_OK | os.X_OK)
    needed = ["tokenizer.json"]
    if weights:
        needed.insert(0, "config.json")
    for name in needed:
        if not (folder / name).is_file():
            raise _incomplete(folder, name)
    tensors = list(folder.glob("*.safetensors")) if weights else []
    if weights and not tensors:
        raise _incomplete(folder, "*.safetensors")
    for file in (*(folder / name for name in needed), *tensors):
        _check_readable(file, os.R_OK)
    read_config(folder)


def _incomplete(folder: Path, name: str) -> ModelError:
    return ModelError(f"--model {folder} is not a model folder: it has no {name}; {FETCH_AGAIN}")


def _check_readable(path: Path, mode: int) -> None:
    """Raise ModelError if this user may not read `path`. In a pod another user may own the files,
    and the engine would report it much later."""
    if not os.access(path, mode, effective_ids=True):
        raise ModelError(
            f"--model: user {os.geteuid()} may not read {path}; chmod -R a+rX makes it readable"
        )


def _from_hub(model: str, revision: str, option: str) -> Path:
    """Fetch the model, or find it in the hub's cache, and return the snapshot's folder."""
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError as error:
        raise ModelError(
            f"{option} {model}: the folder does not exist, and fetching needs huggingface_hub "
            "(pip install '.[serve]' in the checkout)"
        ) from error
    if constants.HF_HUB_OFFLINE:
        problem = "HF_HUB_OFFLINE is set"
    else:
        problem = _unreachable(constants.ENDPOINT, model)
    try:
        snapshot = snapshot_download(
            model,
            revision=revision or None,
            allow_patterns=list(HUB_FILES),
            etag_timeout=HUB_TIMEOUT_S,
            local_files_only=bool(problem),
        )
    except Exception as error:  # the hub's client raises many types; the user gets one line
        reason = problem or " ".join(str(error).split())[:200]
        named = f"{model} at {revision}" if revision else model
        raise ModelError(
            f"{option} {named}: the folder does not exist, and {constants.ENDPOINT} did not "
            f"provide it: {reason}"
        ) from error
    return Path(snapshot)


def _unreachable(endpoint: str, model: str) -> str:
    """Return why the hub does not answer, "" if it does. Checked here, because the hub's client
    would retry for minutes."""
    try:
        with urllib.request.urlopen(f"{endpoint}/api/models/{model}", timeout=HUB_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as answer:
        answer.close()
        return ""  # the hub answered; its client reports the refusal better
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
