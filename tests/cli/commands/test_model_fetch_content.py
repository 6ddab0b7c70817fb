"""`baton model fetch` leaves exactly the hub's bytes, of exactly the weights that a node reads."""

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
from baton_engine.config.families import read_config
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

# --- wrong files ----------------------------------------------------------------------------------


def test_two_processes_without_working_locks_leave_the_right_files(
    hub: StubHub, tmp_path: Path
) -> None:
    """The second process resumes from a partial file that the first is still writing."""

    def requested(count: int) -> bool:
        return len(hub.ranges_of("model.safetensors")) == count

    hub.held = threading.Event()
    processes = []
    for count in (1, 2):
        processes.append(start(tmp_path, before="import fcntl; fcntl.flock = lambda *_: None"))
        wait(partial(requested, count))
    hub.held.set()
    errors = [process.communicate(timeout=DEADLINE_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert contents(tmp_path / "org--model") == FILES


def test_a_file_that_vanishes_during_the_fetch_is_fetched_again(
    hub: StubHub, tmp_path: Path
) -> None:
    interrupt(fetch(tmp_path), b"")
    hub.file_requests.clear()
    hub.held = threading.Event()
    process = start(tmp_path)
    wait(lambda: hub.ranges_of("model.safetensors"))
    (tmp_path / "org--model" / "config.json").unlink()
    hub.held.set()
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    assert contents(tmp_path / "org--model") == FILES


def test_a_fetch_whose_files_keep_vanishing_fails(hub: StubHub, tmp_path: Path) -> None:
    vanish = (
        "from baton_cli.models.download_state import DownloadFolder\n"
        "finish = DownloadFolder.finish\n"
        "def lose(self, wanted): finish(self, wanted); (self.path / 'config.json').unlink()\n"
        "DownloadFolder.finish = lose"
    )
    process = start(tmp_path, before=vanish)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "lost files of hf://org/model in each of 3 fetches" in stderr


def test_a_resumed_file_with_wrong_bytes_is_fetched_from_its_start(
    hub: StubHub, tmp_path: Path
) -> None:
    """A machine that loses power can leave zeros at the end of a file."""
    interrupt(fetch(tmp_path), WEIGHTS[:1000] + bytes(1000))
    hub.file_requests.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert hub.ranges_of("model.safetensors") == ["bytes=2000-", ""]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_digest_is_fetched_once_more_and_then_refused(
    hub: StubHub, tmp_path: Path, name: str
) -> None:
    hub.garbles[name] = 1
    assert contents(fetch(tmp_path / "once")) == FILES
    hub.garbles[name] = 2
    with pytest.raises(
        CommandError, match=f"^{name} of hf://org/model again does not match"
    ) as caught:
        fetch(tmp_path / "twice")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "twice" / "org--model" / name).exists()


def test_without_digests_from_the_hub_a_fetch_succeeds(hub: StubHub, tmp_path: Path) -> None:
    hub.tells_digests = False
    assert contents(fetch(tmp_path)) == FILES


# --- weights --------------------------------------------------------------------------------------


def index_of(*names: str) -> bytes:
    return json.dumps({"weight_map": {f"t{at}": name for at, name in enumerate(names)}}).encode()


def test_the_shards_in_the_safetensors_index_are_fetched(hub: StubHub, tmp_path: Path) -> None:
    shards = {"a.safetensors": WEIGHTS, "b.safetensors": WEIGHTS}
    hub.files |= {INDEX_NAME: index_of(*shards), **shards}
    fetched = contents(fetch(tmp_path))
    assert sorted(name for name in fetched if name.endswith(".safetensors")) == sorted(shards)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"[]", "model.safetensors.index.json of hf://org/model is not a safetensors index"),
        (index_of("a.safetensors"), "hf://org/model has no a.safetensors"),
        (index_of("../model.safetensors"), "expected the name of a file in the same folder"),
        (None, "has no model.safetensors: only safetensors checkpoints can be loaded"),
    ],
)
def test_a_repository_without_readable_weights_is_refused_unless_none_are_wanted(
    hub: StubHub, tmp_path: Path, index: bytes | None, message: str
) -> None:
    del hub.files["model.safetensors"]
    if index is not None:
        hub.files[INDEX_NAME] = index
    with pytest.raises(CommandError) as caught:
        fetch(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    asyncio.run(fetch_of(tmp_path, weights=False).run())


def test_a_folder_without_weights_is_complete_only_for_no_weights(
    hub: StubHub, tmp_path: Path
) -> None:
    bare = fetch_of(tmp_path, weights=False)
    asyncio.run(bare.run())
    assert "model.safetensors" not in contents(bare.folder.path)
    hub.file_requests.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert [name for name, _ in hub.file_requests] == ["model.safetensors"]
    hub.refuses = 500
    asyncio.run(bare.run())


def test_a_fetch_caches_the_weight_digests_that_a_node_needs(
    hub: StubHub,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node mounts the folder read-only, so it cannot write this cache itself."""
    origin = tiny_model("llama-gqa2-tied")
    expected = tensor_digests(origin, read_config(origin))
    hub.files = {path.name: path.read_bytes() for path in origin.glob("[!.]*")}
    folder = fetch(tmp_path)

    def fail(path: Path, threads: int) -> None:
        raise AssertionError(f"{path} was hashed again")

    monkeypatch.setattr(digest, "_hash_file", fail)
    assert tensor_digests(folder, read_config(folder)) == expected
    assert (folder / CACHE_NAME).stat().st_mode & 0o444 == 0o444


def test_weights_that_cannot_be_hashed_cause_only_a_warning(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["model.safetensors"] = b"not at all"
    assert main(["model", "fetch", "hf://org/model", f"--to={tmp_path}"]) == 0
    assert "model.safetensors is no safetensors file" in capsys.readouterr().err
