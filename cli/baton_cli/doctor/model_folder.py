"""A model's folder: config, family, weights, tokenizer, chat template, and memory for it.

It reads the headers of weights, not the weights, and imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from baton_cli.commands.up_plan import Machine, share_machine
from baton_cli.doctor.finding import Finding, of_error
from baton_cli.doctor.host import Host
from baton_cli.errors import CommandError
from baton_cli.local_pool.machine import CPUINFO, decide_dtype, flags_in
from baton_cli.options.records import UpOptions
from baton_cli.options.sizes import about_size
from baton_engine.config import model_folder
from baton_engine.config.engine_config import TorchSettings
from baton_engine.config.families import read_config
from baton_engine.config.model_config import ModelConfig
from baton_engine.config.model_folder import FETCH_AGAIN
from baton_engine.errors import EngineError, ModelError, UnsupportedModel, WeightsError
from baton_engine.memory.host_memory import free_memory
from baton_engine.memory.requirements import layout_of
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_engine.weights.safetensors_files import (
    INDEX_NAME,
    Entry,
    read_index,
    weight_map,
)
from baton_protocol.layout import KVLayout
from baton_text.artifacts import ArtifactError, read_artifacts
from baton_text.chat import NO_TEMPLATE, ChatTemplate
from baton_text.gguf.header import is_gguf
from baton_text.tokenizer import Tokenizer

CHECK = "model"
NO_START = "a node does not start with it"
# Where transformers lists the classes that it knows; searched as text, since importing it takes
# seconds.
LISTED = "models/auto/modeling_auto.py"
NAMES_SHOWN = 3


def check_model(model: str, host: Host) -> Iterator[Finding]:
    path = Path(model).expanduser()
    if not path.exists():
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"--model {model}: the folder does not exist",
            why=NO_START,
            remedy=f"correct the path, or {FETCH_AGAIN}",
        )
        return
    try:
        found = model_folder.find_model(model)
    except ModelError as error:
        yield of_error(CHECK, error, why=NO_START)
        return
    yield from _config(found.path)
    yield from _weights(found.path)
    yield from _texts(found.path)
    try:
        config = read_config(found.path, "baton")
    except EngineError:
        return  # reported above
    if not config.pooling:
        yield from _template(found.path)
    yield from _memory(found.path, host)


def stored_layout(model: str) -> KVLayout | None:
    """The layout of the model's KV with the default flags; None if its config cannot be read."""
    path = Path(model).expanduser()
    if not model or not path.exists():
        return None
    try:
        return layout_of(TorchSettings.of(UpOptions(), path), read_config(path, "baton"))
    except EngineError:
        return None


def _config(path: Path) -> Iterator[Finding]:
    try:
        config = read_config(path, "baton")
    except UnsupportedModel as error:
        architecture = _architecture(path)
        if not _known_to_transformers(architecture):
            yield of_error(CHECK, error, why=NO_START)
            return
        yield Finding(
            check=CHECK,
            severity="note",
            found=f"{architecture} has no family of its own",
            why="transformers' code computes it, more slowly, or a node refuses it at its start",
            remedy="see whether it starts:",
            commands=(f"baton generate --model {path} --prompt Hello --max-tokens 4",),
        )
    except ModelError as error:
        yield of_error(CHECK, error, why=NO_START)
    else:
        yield Finding(check=CHECK, severity="ok", found=_shape(config))


def _shape(config: ModelConfig) -> str:
    return (
        f"{config.architecture}: {config.num_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_kv_heads} KV heads, up to {config.max_positions} positions"
    )


def _architecture(path: Path) -> str:
    named = model_folder.read_config(path).get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _known_to_transformers(architecture: str) -> bool:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not architecture:
        return False
    try:
        text = (Path(spec.origin).parent / LISTED).read_text(encoding="utf-8")
    except OSError:
        return False
    return f'"{architecture}"' in text


def _weights(path: Path) -> Iterator[Finding]:
    try:
        files = weight_files(path)
        entries = {file: read_entries(file) for file in files}
        yield from _not_in_files(path, {file.name: entries[file] for file in files})
    except WeightsError as error:
        yield of_error(CHECK, error, why=NO_START, remedy=FETCH_AGAIN)
        return
    size = sum(file.stat().st_size for file in files)
    dtypes = sorted({entry.dtype for each in entries.values() for entry in each})
    count = sum(map(len, entries.values()))
    yield Finding(
        check=CHECK,
        severity="ok",
        found=f"weights: {about_size(size)} in {len(files)} file{'s' * (len(files) != 1)}, "
        f"{count} tensors of {', '.join(dtypes)}",
    )


def _not_in_files(path: Path, entries: Mapping[str, Sequence[Entry]]) -> Iterator[Finding]:
    """Tensors that the index names, and their files lack."""
    index = None if is_gguf(path) else read_index(path)
    if index is None:
        return
    held = {name: {entry.name for entry in each} for name, each in entries.items()}
    missing = [
        f"{tensor} in {file}"
        for tensor, file in weight_map(index, str(path / INDEX_NAME)).items()
        if tensor not in held[file]
    ]
    if missing:
        more = f" and {len(missing) - NAMES_SHOWN} more" if len(missing) > NAMES_SHOWN else ""
        yield Finding(
            check=CHECK,
            severity="error",
            found=f"{INDEX_NAME} names {', '.join(missing[:NAMES_SHOWN])}{more}; it is not there",
            why=NO_START,
            remedy=FETCH_AGAIN,
        )


def _texts(path: Path) -> Iterator[Finding]:
    try:
        tokenizer = Tokenizer.from_artifacts(read_artifacts(path))
    except ArtifactError as error:
        yield of_error(CHECK, error, why=NO_START, remedy=FETCH_AGAIN)
        return
    yield Finding(check=CHECK, severity="ok", found=f"tokenizer: {tokenizer.vocab_size} tokens")


def _template(path: Path) -> Iterator[Finding]:
    try:
        template = ChatTemplate.from_artifacts(read_artifacts(path))
    except ArtifactError as error:
        yield of_error(CHECK, error, why="chat requests fail", remedy="give --chat-template FILE")
        return
    if template.source:
        yield Finding(check=CHECK, severity="ok", found="it has a chat template")
        return
    yield of_error(
        CHECK, ArtifactError(NO_TEMPLATE), why="/v1/chat/completions is refused", severity="warning"
    )


def _memory(path: Path, host: Host) -> Iterator[Finding]:
    """Whether `baton up` with its default flags fits this machine."""
    flags = flags_in(host.text(str(CPUINFO.relative_to("/"))))
    try:
        dtype = decide_dtype("auto", "cpu", model_folder.read_config(path), flags)
        options = replace(UpOptions(), model=str(path), dtype=dtype)
        machine = Machine(free=lambda: free_memory(host.root))
        shares = share_machine(options, host.environ, machine)
    except CommandError as error:
        yield of_error(CHECK, error, why="`baton up` with the default flags refuses it")
        return
    kv = [share.kv_memory for share in shares if share.kv_memory is not None]
    size = f"{about_size(min(kv))} of KV each" if kv else "the default size of their KV"
    yield Finding(
        check=CHECK,
        severity="ok",
        found=f"`baton up` fits: {len(shares)} engines in {dtype}, with {size}",
    )
