"""Digests name a checkpoint by content, and their cache can be missing, stale, corrupt or away."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton_engine import digest
from baton_engine.config import read_config
from baton_engine.digest import CACHE_NAME, tensor_digests
from baton_engine.weight_files import SINGLE_NAME
from baton_protocol.fingerprint import TensorDigest
from tests.support.torch_engines import small_engine

LONG_AGO_NS = 10**18


@pytest.fixture
def folder(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A private copy of a tied model, last changed long ago, and a private user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("llama-gqa2-tied"), copy, ignore=shutil.ignore_patterns(".*"))
    age(copy)
    return copy


def age(folder: Path, nanoseconds: int = LONG_AGO_NS) -> None:
    os.utime(folder / SINGLE_NAME, ns=(nanoseconds, nanoseconds))


def digests(folder: Path) -> list[TensorDigest]:
    return sorted(tensor_digests(folder, read_config(folder)))


def forbid_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, threads: int) -> tuple[TensorDigest, ...]:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(digest, "_hash_file", fail)


def test_the_same_content_elsewhere_and_sharded_has_the_same_digests(
    folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    tensors = load_file(folder / SINGLE_NAME)
    names = sorted(tensors)
    (elsewhere / SINGLE_NAME).unlink()
    save_file({name: tensors[name] for name in names[:3]}, elsewhere / "a.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, elsewhere / "b.safetensors")
    index = {"weight_map": dict.fromkeys(names[:3], "a.safetensors")}
    index["weight_map"] |= dict.fromkeys(names[3:], "b.safetensors")
    (elsewhere / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digests(elsewhere) == digests(folder)


def test_one_changed_weight_changes_one_digest_and_the_fingerprint(folder: Path) -> None:
    before, fingerprint = digests(folder), small_engine(folder).info.fingerprint
    assert small_engine(folder).info.fingerprint == fingerprint
    tensors = load_file(folder / SINGLE_NAME)
    tensors["model.norm.weight"][7] += 1e-3
    save_file(tensors, folder / SINGLE_NAME)
    age(folder, LONG_AGO_NS + 1)
    changed = set(digests(folder)) ^ set(before)
    assert {each.name for each in changed} == {"model.norm.weight"}
    assert small_engine(folder).info.fingerprint != fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rms_norm_eps": 1e-3},
        {"architectures": ["MistralForCausalLM"]},  # the same weights fit it
        {"a_field_of_next_year": 1},
    ],
)
def test_the_models_config_is_in_the_fingerprint(folder: Path, changes: dict[str, object]) -> None:
    plain = small_engine(folder).info.fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert small_engine(folder).info.fingerprint != plain


@pytest.mark.parametrize(
    "settings", [{"chunk_blocks": 4}, {"block_size": 8}, {"dtype": "bfloat16"}, {"kv_shards": 2}]
)
def test_the_kv_layout_is_in_the_fingerprint(folder: Path, settings: dict[str, Any]) -> None:
    assert (
        small_engine(folder, **settings).info.fingerprint != small_engine(folder).info.fingerprint
    )


def test_a_tied_models_copy_of_the_embedding_is_not_in_the_digests(folder: Path) -> None:
    before = digests(folder)
    tensors = load_file(folder / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / SINGLE_NAME)
    assert digests(folder) == before


def test_a_second_start_reads_the_cache_beside_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(folder)
    assert (folder / CACHE_NAME).is_file()
    forbid_hashing(monkeypatch)
    assert digests(folder) == before


def test_another_time_or_size_makes_the_cache_stale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests(folder)
    age(folder, LONG_AGO_NS + 1)
    forbid_hashing(monkeypatch)
    with pytest.raises(AssertionError, match="hashed again"):
        digests(folder)


def test_files_changed_just_now_are_not_cached(folder: Path) -> None:
    os.utime(folder / SINGLE_NAME)
    digests(folder)
    assert not (folder / CACHE_NAME).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99, "files": {}}', b"\xff\0"])
def test_a_corrupt_cache_is_ignored_and_replaced(
    folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / CACHE_NAME).write_bytes(content)
    before = digests(folder)
    forbid_hashing(monkeypatch)
    assert digests(folder) == before


def test_where_the_folder_cannot_be_written_the_users_cache_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in the cache file's place: a read-only folder would not stop root."""
    (folder / CACHE_NAME).mkdir()
    (folder / CACHE_NAME / "in the way").touch()
    before = digests(folder)
    [place] = (tmp_path / "cache" / "baton" / "digests").iterdir()
    assert place.suffix == ".json"
    forbid_hashing(monkeypatch)
    assert digests(folder) == before
    assert not list(folder.glob(".baton-*.tmp"))
