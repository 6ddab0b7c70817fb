"""Digests name a checkpoint by content, and their cache can be missing, stale, corrupt or away."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton_engine.config.model_config import read_config
from baton_engine.errors import WeightsError
from baton_engine.weights.digest import CACHE_NAME, tensor_digests
from baton_engine.weights.loader import load_weights
from baton_engine.weights.safetensors_files import SINGLE_NAME
from baton_protocol.fingerprint import TensorDigest
from tests.support.engines.torch_engines import small_engine

LONG_AGO_NS = 10**18
MINUTE_NS = 60 * 10**9


@pytest.fixture
def folder(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A private copy of a tied model and a private user cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "model"
    shutil.copytree(tiny_model("llama-gqa2-tied"), copy, ignore=shutil.ignore_patterns(".*"))
    age(copy)
    return copy


def age(folder: Path, nanoseconds: int = LONG_AGO_NS) -> None:
    os.utime(folder / SINGLE_NAME, ns=(nanoseconds, nanoseconds))


def digests(folder: Path, *, verify: bool = False) -> list[TensorDigest]:
    """Of a folder that nobody has changed for a minute: no call can set a ctime back."""
    return sorted(
        tensor_digests(
            *(folder, read_config(folder)),
            verify=verify,
            clock_ns=lambda: time.time_ns() + MINUTE_NS,
        )
    )


def other_weights(folder: Path) -> bytes:
    """A file of the same size with one other weight."""
    data = bytearray((folder / SINGLE_NAME).read_bytes())
    data[-4] ^= 1  # the lowest byte of the last one
    return bytes(data)


def spoil(cache: Path, known: list[TensorDigest]) -> None:
    """Put a wrong digest into the cache: a start that reads it does not find those known."""
    text = cache.read_text()
    assert known[0].digest in text
    cache.write_text(text.replace(known[0].digest, "0" * 64))


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


def test_a_second_start_reads_the_cache_beside_the_weights(folder: Path) -> None:
    before = digests(folder)
    assert digests(folder) == before
    spoil(folder / CACHE_NAME, before)
    assert digests(folder) != before


def test_another_time_or_size_makes_the_cache_stale(folder: Path) -> None:
    before = digests(folder)
    spoil(folder / CACHE_NAME, before)
    age(folder, LONG_AGO_NS + 1)
    assert digests(folder) == before


def overwritten(path: Path, data: bytes) -> None:
    """As an editor of weights does it, or `rsync --inplace`."""
    path.write_bytes(data)


def replaced(path: Path, data: bytes) -> None:
    """As `rsync` and `cp` to a new name do it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.rename(path)


@pytest.mark.parametrize("change", [overwritten, replaced])
def test_a_tool_that_keeps_times_does_not_keep_the_old_digests(
    folder: Path, change: Callable[[Path, bytes], None]
) -> None:
    before, path = digests(folder), folder / SINGLE_NAME
    size = path.stat().st_size
    change(path, other_weights(folder))
    age(folder)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, LONG_AGO_NS)
    assert digests(folder) != before


@pytest.mark.parametrize("seconds_ago", [0.0, 1.9])
def test_files_changed_just_before_they_are_hashed_are_not_cached(
    folder: Path, seconds_ago: float
) -> None:
    """Another change within the granularity of the file system's clock would keep all times. How
    long the hashing takes does not matter."""
    changed_ns = (folder / SINGLE_NAME).stat().st_ctime_ns
    now_ns = changed_ns + int(seconds_ago * 1e9)
    tensor_digests(folder, read_config(folder), clock_ns=lambda: now_ns)
    assert not (folder / CACHE_NAME).exists()
    now_ns = changed_ns + int(2.1e9)
    tensor_digests(folder, read_config(folder), clock_ns=lambda: now_ns)
    assert (folder / CACHE_NAME).exists()


def test_a_start_that_verifies_weights_hashes_them_again_and_corrects_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = digests(folder)
    spoil(folder / CACHE_NAME, right)
    assert digests(folder) != right
    with caplog.at_level(logging.WARNING):
        assert digests(folder, verify=True) == right
    assert f"the digests kept for {SINGLE_NAME} were wrong" in caplog.text
    assert digests(folder) == right
    spoil(folder / CACHE_NAME, right)
    wrong = small_engine(folder).info.fingerprint
    assert small_engine(folder, verify_weights=True).info.fingerprint != wrong


def test_weights_that_change_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fingerprint would be that of the weights before."""
    data = other_weights(folder)

    def slowly(*given: Any) -> None:
        load_weights(*given)
        overwritten(folder / SINGLE_NAME, data)

    monkeypatch.setattr("baton_engine.build.load_weights", slowly)
    with pytest.raises(WeightsError, match=f"{SINGLE_NAME} in .* changed while"):
        small_engine(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99, "files": {}}', b"\xff\0"])
def test_a_corrupt_cache_is_ignored_and_replaced(folder: Path, content: bytes) -> None:
    (folder / CACHE_NAME).write_bytes(content)
    before = digests(folder)
    assert digests(folder) == before
    spoil(folder / CACHE_NAME, before)
    assert digests(folder) != before


def test_where_the_folder_cannot_be_written_the_users_cache_is_used(
    folder: Path, tmp_path: Path
) -> None:
    """A directory in the cache file's place: a read-only folder would not stop root."""
    (folder / CACHE_NAME).mkdir()
    (folder / CACHE_NAME / "in the way").touch()
    before = digests(folder)
    [place] = (tmp_path / "cache" / "baton" / "digests").iterdir()
    assert place.suffix == ".json"
    assert digests(folder) == before
    assert not list(folder.glob(".baton-*.tmp"))
    spoil(place, before)
    assert digests(folder) != before
