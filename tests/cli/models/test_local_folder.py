"""--model: a folder, a hub id, or one clear line."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton_cli.errors import CommandError
from baton_cli.models.local_folder import find_model, read_config

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def make_folder(place: Path) -> Path:
    path = place / "Tiny-Model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


class Refusing(BaseHTTPRequestHandler):
    """A hub that knows no model."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(120)
    server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_folder_s_last_component_is_the_model_s_name(folder: Path) -> None:
    for spelling in (str(folder), f"{folder}/", f"{folder}/../Tiny-Model"):
        assert find_model(spelling).name == "Tiny-Model"
        assert find_model(spelling).path == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused_by_what_it_lacks(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    shown = missing.replace("model.", r"\*.")
    with pytest.raises(CommandError, match=f"is no model folder: it holds no {shown}"):
        find_model(str(folder))


def test_the_simulated_engine_needs_a_tokenizer_only(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    assert find_model(str(folder), weights=False).path == folder


@contextmanager
def a_user_without_rights() -> Iterator[None]:
    """root may read everything, so it becomes nobody for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("hidden", [".", "config.json", "model.safetensors"])
def test_what_the_user_may_not_read_is_named(hidden: str) -> None:
    # Not below tmp_path, whose parents are closed to others.
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name))
        folder.parent.chmod(0o755)
        (folder / hidden).chmod(0)
        with a_user_without_rights(), pytest.raises(CommandError, match="may not read") as caught:
            find_model(str(folder))
        folder.chmod(0o755)
    assert str(folder / hidden) in str(caught.value)


def test_a_broken_config_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CommandError, match=r"config.json is no JSON"):
        find_model(str(folder))


def test_a_config_is_read_as_it_is(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert read_config(folder) == {"dtype": "bfloat16"}


@pytest.mark.parametrize("model", ["/no/such/folder", "./x", "../x/y", "a/b/c", "~nobody/x"])
def test_a_path_without_a_folder_is_refused_at_once(model: str) -> None:
    with pytest.raises(CommandError, match="there is no such folder"):
        find_model(model)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(CommandError, match="is a file; give the folder"):
        find_model(str(folder / "config.json"))


def test_no_model_at_all_is_refused_with_a_hint() -> None:
    with pytest.raises(CommandError, match="--model is missing"):
        find_model("")


def test_a_hub_that_is_out_of_reach_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)  # port 9: nobody listens
    with pytest.raises(
        CommandError, match=r"http://127.0.0.1:9 did not give it: .*refused"
    ) as info:
        find_model("somebody/some-model")
    assert "\n" not in str(info.value)


def test_a_hub_that_does_not_know_the_model_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusing_hub: str
) -> None:
    use_hub(monkeypatch, refusing_hub, tmp_path)
    with pytest.raises(CommandError, match="did not give it") as info:
        find_model("somebody/some-model")
    assert "\n" not in str(info.value)


def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="did not give it: HF_HUB_OFFLINE is set"):
        find_model("somebody/some-model")


def test_what_the_hub_gave_before_is_used_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    repository = tmp_path / "cache" / "models--somebody--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    found = find_model("somebody/some-model")
    assert (found.path, found.name) == (snapshot, "somebody/some-model")
