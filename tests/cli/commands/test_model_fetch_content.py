"""`baton model fetch` ends with the hub's very bytes, of the weights that a node reads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from baton_cli.errors import CommandError
from baton_cli.main import main
from baton_engine.config.model_config import read_config
from baton_engine.weights import digest
from baton_engine.weights.digest import CACHE_NAME, tensor_digests
from baton_engine.weights.safetensors_files import INDEX_NAME
from tests.support.hubs.model_fetch import (
    DEADLINE_S,
    FILES,
    WEIGHTS,
    contents,
    fetch,
    fetch_of,
    interrupt,
    start,
    wait,
)
from tests.support.hubs.stub_hub import StubHub

pytestmark = pytest.mark.integration

# --- what is wrong --------------------------------------------------------------------------------


def test_two_on_a_volume_without_locks_leave_the_right_files(hub: StubHub, tmp_path: Path) -> None:
    """There the lock holds nobody off. The second takes over what the first still writes."""

    def asked(times: int) -> bool:
        return len(hub.ranges_of("model.safetensors")) == times

    hub.held = threading.Event()
    both = []
    for requests in (1, 2):
        both.append(start(tmp_path, before="import fcntl; fcntl.flock = lambda *_: None"))
        wait(partial(asked, requests))
    hub.held.set()
    told = [process.communicate(timeout=DEADLINE_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert contents(tmp_path / "org--model") == FILES


def test_a_file_that_vanishes_meanwhile_is_fetched_again(hub: StubHub, tmp_path: Path) -> None:
    interrupt(fetch(tmp_path), b"")
    hub.asked.clear()
    hub.held = threading.Event()
    process = start(tmp_path)
    wait(lambda: hub.ranges_of("model.safetensors"))
    (tmp_path / "org--model" / "config.json").unlink()
    hub.held.set()
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, told
    assert contents(tmp_path / "org--model") == FILES


def test_files_that_vanish_each_time_are_not_called_complete(hub: StubHub, tmp_path: Path) -> None:
    vanish = (
        "from baton_cli.models.download_state import Fetched; finish = Fetched.finish\n"
        "def lose(self, wanted): finish(self, wanted); (self.path / 'config.json').unlink()\n"
        "Fetched.finish = lose"
    )
    process = start(tmp_path, before=vanish)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "lost files of hf://org/model each of 3 times" in told


def test_a_resumed_file_whose_bytes_are_not_the_hubs_is_fetched_anew(
    hub: StubHub, tmp_path: Path
) -> None:
    """A machine that loses power can leave zeros at the end of a file."""
    interrupt(fetch(tmp_path), WEIGHTS[:1000] + bytes(1000))
    hub.asked.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert hub.ranges_of("model.safetensors") == ["bytes=2000-", ""]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_comes_wrong_is_fetched_once_more_and_then_refused(
    hub: StubHub, tmp_path: Path, name: str
) -> None:
    hub.garbles[name] = 1
    assert contents(fetch(tmp_path / "once")) == FILES
    hub.garbles[name] = 2
    with pytest.raises(CommandError, match=f"^{name} of hf://org/model is again not what") as told:
        fetch(tmp_path / "twice")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "twice" / "org--model" / name).exists()


def test_of_a_hub_that_tells_no_digests_the_sizes_are_checked(hub: StubHub, tmp_path: Path) -> None:
    hub.tells_digests = False
    assert contents(fetch(tmp_path)) == FILES


# --- weights --------------------------------------------------------------------------------------


def index_of(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"t{at}": name for at, name in enumerate(names)}}).encode()


def test_of_a_sharded_model_the_files_of_its_index_are_fetched(
    hub: StubHub, tmp_path: Path
) -> None:
    shards = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}
    hub.files |= {INDEX_NAME: index_of(*shards), **shards}
    fetched = contents(fetch(tmp_path))
    assert sorted(name for name in fetched if name.endswith(".safetensors")) == sorted(shards)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"[]", "model.safetensors.index.json of hf://org/model is not a safetensors index"),
        (index_of("a.safetensors"), "hf://org/model holds no a.safetensors"),
        (index_of("../model.safetensors"), "hf://org/model holds no ../model.safetensors"),
        (None, "holds no model.safetensors: only safetensors checkpoints can be loaded"),
    ],
)
def test_a_repository_without_readable_weights_is_refused_unless_none_are_wanted(
    hub: StubHub, tmp_path: Path, index: bytes | None, words: str
) -> None:
    del hub.files["model.safetensors"]
    if index is not None:
        hub.files[INDEX_NAME] = index
    with pytest.raises(CommandError) as caught:
        fetch(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    asyncio.run(fetch_of(tmp_path, weights=False).run())


def test_a_folder_without_weights_is_complete_for_who_wants_none(
    hub: StubHub, tmp_path: Path
) -> None:
    bare = fetch_of(tmp_path, weights=False)
    asyncio.run(bare.run())
    assert "model.safetensors" not in contents(bare.folder.path)
    hub.asked.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert [name for name, _ in hub.asked] == ["model.safetensors"]
    hub.refuses = 500
    asyncio.run(bare.run())


def test_a_node_finds_the_digests_of_the_weights_and_does_not_hash_them(
    hub: StubHub,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node mounts the folder read-only: it could not keep them."""
    origin = tiny_model("llama-gqa2-tied")
    expected = tensor_digests(origin, read_config(origin))
    hub.files = {path.name: path.read_bytes() for path in origin.glob("[!.]*")}
    folder = fetch(tmp_path)

    def fail(path: Path, threads: int) -> None:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(digest, "_hash_file", fail)
    assert tensor_digests(folder, read_config(folder)) == expected
    assert (folder / CACHE_NAME).stat().st_mode & 0o444 == 0o444


def test_weights_that_cannot_be_hashed_are_told_of_and_left_to_the_node(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["model.safetensors"] = b"not at all"
    assert main(["model", "fetch", "hf://org/model", f"--to={tmp_path}"]) == 0
    assert "model.safetensors is no safetensors file" in capsys.readouterr().err
