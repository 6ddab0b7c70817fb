"""Which files of a model folder become artifacts, and the errors for an invalid folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton_text.artifacts import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    ArtifactError,
    byte_artifacts,
    digest,
    load_json,
    read_artifacts,
)
from baton_text.chat import ChatTemplate
from baton_text.parsers.hermes import HERMES
from baton_text.parsers.registry import reasoning_parser_for, tool_parser_for
from tests.support.engines.text_models import byte_level_artifacts, write_artifacts

HELLO = [{"role": "user", "content": "hello"}]


def test_read_artifacts_returns_known_files_unchanged_and_skips_others(tmp_path: Path) -> None:
    wanted = {**byte_level_artifacts(), "additional_chat_templates/rag.jinja": b"rag"}
    write_artifacts({**wanted, "model.safetensors": b"weights"}, tmp_path)
    assert read_artifacts(tmp_path) == wanted


def test_the_error_names_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=str(tmp_path / "tokenizer.json")):
        read_artifacts(tmp_path)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_given_template_replaces_all_of_the_models(tmp_path: Path, as_file: bool) -> None:
    artifacts = byte_level_artifacts()
    config = json.loads(artifacts[TOKENIZER_CONFIG])
    config["chat_template"] = [{"name": "tool_use", "template": "configured"}]
    artifacts[TOKENIZER_CONFIG] = json.dumps(config).encode()
    artifacts["additional_chat_templates/tool_use.jinja"] = b"beside"
    write_artifacts(artifacts, tmp_path)
    source = "mine {{ messages[0].content }}"
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    template = ChatTemplate.from_artifacts(read_artifacts(tmp_path, file if as_file else source))
    assert template.render(HELLO) == "mine hello"
    assert template.render(HELLO, tools=[{"type": "function"}]) == "mine hello"


def test_the_error_names_a_missing_template_file(tmp_path: Path) -> None:
    write_artifacts(byte_level_artifacts(), tmp_path)
    with pytest.raises(ArtifactError, match=r"no-such\.jinja"):
        read_artifacts(tmp_path, "no-such.jinja")


def test_byte_artifacts_are_deterministic_and_contain_the_limits() -> None:
    artifacts = byte_artifacts(vocab_size=1000, max_model_len=77)
    assert artifacts == byte_artifacts(vocab_size=1000, max_model_len=77)
    config = load_json(artifacts, "config.json")
    assert (config["vocab_size"], config["max_position_embeddings"]) == (1000, 77)
    with pytest.raises(ArtifactError, match="258"):
        byte_artifacts(vocab_size=258)


CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {"zone": 1}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "Noon."},
]


def test_the_byte_tokenizers_template_shows_tools_and_calls_as_hermes_does() -> None:
    artifacts = byte_artifacts()
    template = ChatTemplate.from_artifacts(artifacts)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
    assert template.render(messages) == "<|bos|>[system]\n\n[user]\nHi\n[assistant]\n"
    assert template.render(HISTORY, tools=[{"type": "function"}]) == (
        '<|bos|>[tools]\n{"type": "function"}\n[user]\nWhen?\n[assistant]\n<tool_call>\n'
        '{"name": "now", "arguments": {"zone": 1}}\n</tool_call>\n[tool]\nNoon.\n[assistant]\n'
    )
    source = artifacts[CHAT_TEMPLATE].decode()
    assert tool_parser_for(source) is HERMES
    assert reasoning_parser_for(source) is None


def test_the_error_names_a_file_with_invalid_json() -> None:
    with pytest.raises(ArtifactError, match=r"config\.json is not JSON"):
        load_json({"config.json": b"{"}, "config.json")
    with pytest.raises(ArtifactError, match=r"config\.json holds a list"):
        load_json({"config.json": b"[]"}, "config.json")
    assert load_json({}, "config.json") == {}


def test_digests_are_sha256() -> None:
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert CHAT_TEMPLATE in byte_artifacts()
