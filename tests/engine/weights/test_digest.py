"""Weight digests depend only on content. Their cache may be missing, stale, corrupt or not
writable."""

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

from baton_engine.config.families import read_config
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
    """Sorted digests, with a clock one minute ahead: digests of files that changed a moment ago are
    not cached, and a ctime cannot be set back."""
    return sorted(
        tensor_digests(
            *(folder, read_config(folder)),
            verify=verify,
            clock_ns=lambda: time.time_ns() + MINUTE_NS,
        )
    )


def changed_weights(folder: Path) -> bytes:
    """The content of the weights file with one weight changed."""
    data = bytearray((folder / SINGLE_NAME).read_bytes())
    data[-4] ^= 1  # the lowest byte of the last weight
    return bytes(data)


def corrupt(cache: Path, known: list[TensorDigest]) -> None:
    """Replace a known digest in the cache with a wrong one, so a test can see whether the cache is
    used."""
    text = cache.read_text()
    assert known[0].digest in text
    cache.write_text(text.replace(known[0].digest, "0" * 64))


def test_the_same_content_in_another_folder_and_in_shards_has_the_same_digests(
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
        {"architectures": ["MistralForCausalLM"]},  # a model with the same weight shapes
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


def test_the_second_call_reads_the_cache_in_the_models_folder(folder: Path) -> None:
    before = digests(folder)
    assert digests(folder) == before
    corrupt(folder / CACHE_NAME, before)
    assert digests(folder) != before


def test_a_changed_modification_time_makes_the_cache_stale(folder: Path) -> None:
    before = digests(folder)
    corrupt(folder / CACHE_NAME, before)
    age(folder, LONG_AGO_NS + 1)
    assert digests(folder) == before


def overwrite(path: Path, data: bytes) -> None:
    """Write in place, like `rsync --inplace`."""
    path.write_bytes(data)


def replace(path: Path, data: bytes) -> None:
    """Write a new file and rename it, like `rsync`."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.rename(path)


@pytest.mark.parametrize("change", [overwrite, replace])
def test_a_change_that_keeps_size_and_modification_time_is_detected(
    folder: Path, change: Callable[[Path, bytes], None]
) -> None:
    before, path = digests(folder), folder / SINGLE_NAME
    size = path.stat().st_size
    change(path, changed_weights(folder))
    age(folder)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, LONG_AGO_NS)
    assert digests(folder) != before


@pytest.mark.parametrize("seconds_ago", [0.0, 1.9])
def test_files_changed_just_before_they_are_hashed_are_not_cached(
    folder: Path, seconds_ago: float
) -> None:
    """A second change within the granularity of the file system's clock would keep all times. The
    duration of the hashing does not matter."""
    changed_ns = (folder / SINGLE_NAME).stat().st_ctime_ns
    now_ns = changed_ns + int(seconds_ago * 1e9)
    tensor_digests(folder, read_config(folder), clock_ns=lambda: now_ns)
    assert not (folder / CACHE_NAME).exists()
    now_ns = changed_ns + int(2.1e9)
    tensor_digests(folder, read_config(folder), clock_ns=lambda: now_ns)
    assert (folder / CACHE_NAME).exists()


def test_verify_hashes_the_weights_again_and_corrects_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    correct = digests(folder)
    corrupt(folder / CACHE_NAME, correct)
    assert digests(folder) != correct
    with caplog.at_level(logging.WARNING):
        assert digests(folder, verify=True) == correct
    assert f"the digests kept for {SINGLE_NAME} were wrong" in caplog.text
    assert digests(folder) == correct
    corrupt(folder / CACHE_NAME, correct)
    wrong = small_engine(folder).info.fingerprint
    assert small_engine(folder, verify_weights=True).info.fingerprint != wrong


def test_weights_that_change_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint would be that of the old weights."""
    data = changed_weights(folder)

    def load_then_change(*args: Any) -> None:
        load_weights(*args)
        overwrite(folder / SINGLE_NAME, data)

    monkeypatch.setattr("baton_engine.build.load_weights", load_then_change)
    with pytest.raises(WeightsError, match=f"{SINGLE_NAME} in .* changed while"):
        small_engine(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99, "files": {}}', b"\xff\0"])
def test_a_corrupt_cache_is_ignored_and_replaced(folder: Path, content: bytes) -> None:
    (folder / CACHE_NAME).write_bytes(content)
    before = digests(folder)
    assert digests(folder) == before
    corrupt(folder / CACHE_NAME, before)
    assert digests(folder) != before


def test_if_the_folder_is_not_writable_the_users_cache_is_used(
    folder: Path, tmp_path: Path
) -> None:
    """The test puts a directory in place of the cache file, because root may write to a read-only
    folder."""
    (folder / CACHE_NAME).mkdir()
    (folder / CACHE_NAME / "in the way").touch()
    before = digests(folder)
    [cache] = (tmp_path / "cache" / "baton" / "digests").iterdir()
    assert cache.suffix == ".json"
    assert digests(folder) == before
    assert not list(folder.glob(".baton-*.tmp"))
    corrupt(cache, before)
    assert digests(folder) != before
