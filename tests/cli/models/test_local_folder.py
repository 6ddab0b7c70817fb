"""--model finds a folder or a hub id, or fails with one clear line."""

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
from tests.support.engines.gguf_bytes import File

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


def test_a_gguf_file_is_a_model_with_its_own_name(tmp_path: Path) -> None:
    path = File().write(tmp_path / "Tiny-Q8_0.gguf")
    found = find_model(str(path))
    assert (found.path, found.name) == (path, "Tiny-Q8_0")
    assert read_config(path)["architectures"] == ["LlamaForCausalLM"]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(CommandError, match=r"is a file; give the folder .* or a file \*\.gguf"):
        find_model(str(other))
    damaged = File(version=9).write(tmp_path / "model.gguf")
    with pytest.raises(CommandError, match=f"--model {damaged} has version 9; supported: 2, 3"):
        find_model(str(damaged))


class Refusing(BaseHTTPRequestHandler):
    """A hub that answers 404 for every model."""

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


def test_the_folder_s_name_is_the_model_s_name(folder: Path) -> None:
    for spelling in (str(folder), f"{folder}/", f"{folder}/../Tiny-Model"):
        assert find_model(spelling).name == "Tiny-Model"
        assert find_model(spelling).path == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_model_is_refused_and_the_missing_file_is_named(
    folder: Path, missing: str
) -> None:
    (folder / missing).unlink()
    shown = missing.replace("model.", r"\*.")
    with pytest.raises(CommandError, match=f"is not a model folder: it has no {shown}"):
        find_model(str(folder))


def test_the_simulated_engine_needs_only_a_tokenizer(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    assert find_model(str(folder), weights=False).path == folder


@contextmanager
def unprivileged_user() -> Iterator[None]:
    """Become the user nobody for a moment, because root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("hidden", [".", "config.json", "model.safetensors"])
def test_an_unreadable_path_is_named_in_the_error(hidden: str) -> None:
    # Not below tmp_path, whose parents other users may not read.
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name))
        folder.parent.chmod(0o755)
        (folder / hidden).chmod(0)
        with unprivileged_user(), pytest.raises(CommandError, match="may not read") as caught:
            find_model(str(folder))
        folder.chmod(0o755)
    assert str(folder / hidden) in str(caught.value)


def test_a_broken_config_is_an_error_that_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CommandError, match=r"config.json is not valid JSON"):
        find_model(str(folder))


def test_a_config_is_read_unchanged(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert read_config(folder) == {"dtype": "bfloat16"}


@pytest.mark.parametrize("model", ["/no/such/folder", "./x", "../x/y", "a/b/c", "~nobody/x"])
def test_a_path_without_a_folder_is_refused_at_once(model: str) -> None:
    with pytest.raises(CommandError, match="the folder does not exist"):
        find_model(model)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(CommandError, match="is a file; give the folder"):
        find_model(str(folder / "config.json"))


def test_an_empty_model_flag_is_refused() -> None:
    with pytest.raises(CommandError, match="--model is missing"):
        find_model("")


def test_an_unreachable_hub_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)  # no process listens on port 9
    with pytest.raises(
        CommandError, match=r"http://127.0.0.1:9 did not provide it: .*refused"
    ) as caught:
        find_model("somebody/some-model")
    assert "\n" not in str(caught.value)


def test_a_model_that_the_hub_does_not_have_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusing_hub: str
) -> None:
    use_hub(monkeypatch, refusing_hub, tmp_path)
    with pytest.raises(CommandError, match="did not provide it") as caught:
        find_model("somebody/some-model")
    assert "\n" not in str(caught.value)


def test_with_hf_hub_offline_the_hub_is_not_contacted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CommandError, match="did not provide it: HF_HUB_OFFLINE is set"):
        find_model("somebody/some-model")


def test_a_cached_model_is_used_when_the_hub_is_unreachable(
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
