"""A model's small files as bytes: nodes serve them, and routers fetch them by digest.

In: a model folder, a GGUF file, or nothing for the simulated engine's byte tokenizer. Out: file
name -> bytes. Of a GGUF file they are made from its metadata.

    ArtifactError   a file is missing, unreadable or invalid; the message names it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from baton_text.bytelevel import BYTE_TO_CHAR
from baton_text.gguf.config import config_of, generation_of
from baton_text.gguf.header import GgufError, is_gguf, read_header
from baton_text.gguf.metadata import Metadata
from baton_text.gguf.tokenizer import tokenizer_files

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
# Not in the model folder: the parsers that the node's flags select, see parsers.registry.
BATON = "baton.json"
OPTIONAL = (TOKENIZER_CONFIG, CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS_MAP, CHAT_TEMPLATE)
# What describes the model, whichever tokenizer it has.
OF_MODEL = (CONFIG, GENERATION_CONFIG)

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

# The simulated engine's vocabulary: id = byte, then three special tokens.
BYTE_BOS_ID = 256
BYTE_EOS_ID = 257
BYTE_PAD_ID = 258
BYTE_VOCAB_SIZE = 259
_BYTE_SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
# Tools and calls look like the Hermes family's, so the Hermes parser reads the answers.
_BYTE_TEMPLATE = """\
{{ bos_token }}{% if tools %}
[tools]
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{% endif %}
{% for message in messages %}
[{{ message['role'] }}]
{% if message['content'] or not message['tool_calls'] %}
{{ message['content'] }}
{% endif %}
{% for call in message['tool_calls'] or [] %}
{% set arguments = call['function']['arguments'] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": \
{{ arguments if arguments is string else arguments | tojson }}}
</tool_call>
{% endfor %}
{% endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}
"""


class ArtifactError(Exception):
    """A model's file is missing, unreadable or not supported."""


def digest(data: bytes) -> str:
    """SHA-256 as hex: the name under which an artifact is served."""
    return hashlib.sha256(data).hexdigest()


def read_artifacts(
    model: Path, chat_template: Path | str | None = None, tokenizer: Path | None = None
) -> dict[str, bytes]:
    """Read the tokenizer, configs and templates of a Hugging Face folder or a GGUF file. Raises
    ArtifactError.

    `chat_template` replaces all templates of the model. It is a file's path, or the template itself
    if it is a string that contains "{". `tokenizer` is another folder or file, which has the
    tokenizer and the templates; only the model's configs are then read from `model`.
    """
    files = _read(model if tokenizer is None else tokenizer)
    if tokenizer is not None:
        files = {name: data for name, data in files.items() if name not in OF_MODEL}
        files |= _configs_of(model)
    return files if chat_template is None else _with_template(files, chat_template)


def _read(path: Path) -> dict[str, bytes]:
    return _of_file(path) if is_gguf(path) else _of_folder(path)


def _configs_of(model: Path) -> dict[str, bytes]:
    if is_gguf(model):
        return {name: data for name, data in _of_file(model).items() if name in OF_MODEL}
    return {name: (model / name).read_bytes() for name in OF_MODEL if (model / name).is_file()}


def _of_file(path: Path) -> dict[str, bytes]:
    try:
        header = read_header(path, tokenizer=True)
        files = tokenizer_files(Metadata(header))
        files[CONFIG] = json.dumps(config_of(header))
        files[GENERATION_CONFIG] = json.dumps(generation_of(header))
    except GgufError as error:
        raise ArtifactError(str(error)) from error
    return {name: files[name].encode() for name in sorted(files)}


def _of_folder(folder: Path) -> dict[str, bytes]:
    path = folder / TOKENIZER
    if not path.is_file():
        raise ArtifactError(f"{path} is missing: not a Hugging Face folder with a fast tokenizer")
    names = [TOKENIZER, *(name for name in OPTIONAL if (folder / name).is_file())]
    names += [f"{MORE_TEMPLATES}/{file.name}" for file in (folder / MORE_TEMPLATES).glob("*.jinja")]
    try:
        return {name: (folder / name).read_bytes() for name in sorted(names)}
    except OSError as error:
        raise ArtifactError(f"cannot read the tokenizer in {folder}: {error}") from error


def _with_template(files: Mapping[str, bytes], template: Path | str) -> dict[str, bytes]:
    if isinstance(template, str) and "{" in template:
        source = template.encode()
    else:
        try:
            source = Path(template).read_bytes()
        except OSError as error:
            raise ArtifactError(f"cannot read chat template {template}: {error}") from error
    kept = {name: data for name, data in files.items() if not name.startswith(MORE_TEMPLATES)}
    config = load_json(files, TOKENIZER_CONFIG)
    if config.pop("chat_template", None) is not None:
        kept[TOKENIZER_CONFIG] = json.dumps(config).encode()
    return {**kept, CHAT_TEMPLATE: source}


def load_json(artifacts: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parse an artifact as a JSON object; empty if missing. Raise ArtifactError if invalid."""
    data = artifacts.get(name)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ArtifactError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{name} holds a {type(value).__name__}, not an object")
    return value


def special_tokens(artifacts: Mapping[str, bytes]) -> dict[str, str]:
    """Map the names that templates use (bos_token, eos_token, ...) to the tokens' texts.

    As in transformers, special_tokens_map.json of older models overrides tokenizer_config.json,
    unless the latter has added_tokens_decoder.
    """
    config = load_json(artifacts, TOKENIZER_CONFIG)
    older = {} if "added_tokens_decoder" in config else load_json(artifacts, SPECIAL_TOKENS_MAP)
    named = {**config, **older}
    texts = {name: token_content(named[name]) for name in SPECIAL_NAMES if name in named}
    return {name: text for name, text in texts.items() if text is not None}


def token_content(value: object) -> str | None:
    """The text of a token, which is a string or an object with `content`; None for others."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def byte_artifacts(
    vocab_size: int = BYTE_VOCAB_SIZE, max_model_len: int = 8192
) -> dict[str, bytes]:
    """Artifacts of the simulated engine: 256 byte tokens (id = byte), BOS, EOS, PAD.

    With a larger `vocab_size`, the further ids have no token. Deterministic: equal arguments give
    equal bytes. Raise ArtifactError for a smaller one.
    """
    if vocab_size < BYTE_VOCAB_SIZE:
        raise ArtifactError(f"vocab_size is {vocab_size}; the byte tokenizer has {BYTE_VOCAB_SIZE}")
    backend = Backend(models.BPE(vocab={c: b for b, c in enumerate(BYTE_TO_CHAR)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in _BYTE_SPECIALS])
    bos, eos, pad = _BYTE_SPECIALS
    ids = {
        "bos_token_id": BYTE_BOS_ID,
        "eos_token_id": BYTE_EOS_ID,
        "pad_token_id": BYTE_PAD_ID,
    }
    config = {
        "architectures": ["SimForCausalLM"],
        "model_type": "sim",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_len,
        **ids,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
    }
    return {
        TOKENIZER: backend.to_str().encode(),
        TOKENIZER_CONFIG: json.dumps(tokenizer_config).encode(),
        CONFIG: json.dumps(config).encode(),
        GENERATION_CONFIG: json.dumps(ids).encode(),
        CHAT_TEMPLATE: _BYTE_TEMPLATE.encode(),
    }
