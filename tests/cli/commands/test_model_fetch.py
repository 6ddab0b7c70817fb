"""`baton model fetch` against a local hub: downloads, resumed downloads, errors, reports."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton_cli.commands.fetch_options import FetchOptions
from baton_cli.commands.model_fetch import make_fetch
from baton_cli.errors import CommandError, UsageError
from baton_cli.main import main
from baton_cli.models.download_state import PART
from baton_cli.models.hub_client import FIRST_RETRIES
from baton_cli.models.model_fetch import show_progress
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.registry import Registry
from baton_protocol.store import FetchReport
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

# --- downloads ------------------------------------------------------------------------------------


def test_fetch_downloads_the_files_that_a_node_reads_and_prints_the_folder(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "fetch", "hf://org/model", f"--to={tmp_path}"]) == 0
    folder = tmp_path / "org--model"
    printed = capsys.readouterr()
    assert printed.out == f"{folder}\n"
    assert "1 MiB, fetched in" in printed.err
    assert contents(folder) == FILES


def test_a_complete_model_causes_no_request_to_the_hub(hub: StubHub, tmp_path: Path) -> None:
    fetch(tmp_path)
    requests = len(hub.file_requests)
    hub.refuses = 500
    assert contents(fetch(tmp_path)) == FILES
    assert len(hub.file_requests) == requests


def test_a_revision_has_its_own_folder(hub: StubHub, tmp_path: Path) -> None:
    assert fetch(tmp_path, "hf://org/model@v1").name == "org--model@v1"


def test_only_a_truncated_file_is_fetched_again(hub: StubHub, tmp_path: Path) -> None:
    folder = fetch(tmp_path)
    os.truncate(folder / "model.safetensors", 100)
    hub.file_requests.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert [name for name, _ in hub.file_requests] == ["model.safetensors"]


def test_sizes_that_the_hub_does_not_list_are_requested(hub: StubHub, tmp_path: Path) -> None:
    hub.tells_sizes = False
    assert contents(fetch(tmp_path)) == FILES


def test_the_token_is_not_sent_to_the_target_of_a_redirect(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token, hub.redirects = "t0ken", True
    monkeypatch.setenv("HF_TOKEN", "t0ken")
    assert contents(fetch(tmp_path)) == FILES
    assert hub.tokens == {"Bearer t0ken"}
    assert hub.cdn_tokens == {""}


# --- interruptions --------------------------------------------------------------------------------


def test_a_broken_download_resumes_at_its_last_byte(hub: StubHub, tmp_path: Path) -> None:
    hub.breaks["model.safetensors"] = 3
    assert contents(fetch(tmp_path, pauses_s=(0.01,))) == FILES
    size = len(WEIGHTS)
    rest = [f"bytes={size - size // part}-" for part in (2, 4, 8)]
    assert hub.ranges_of("model.safetensors") == ["", *rest]


def test_without_range_support_a_file_is_fetched_from_its_start(
    hub: StubHub, tmp_path: Path
) -> None:
    hub.ranges = False
    interrupt(fetch(tmp_path), WEIGHTS[:1000])
    assert contents(fetch(tmp_path)) == FILES


def test_the_next_process_resumes_a_killed_fetch(hub: StubHub, tmp_path: Path) -> None:
    hub.held = threading.Event()
    parts = partial((tmp_path / "org--model").glob, f"model.safetensors.*{PART}")
    killed = start(tmp_path)
    wait(lambda: [1 for part in parts() if part.stat().st_size >= len(WEIGHTS) // 2])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    hub.held.set()
    hub.file_requests.clear()
    assert contents(fetch(tmp_path)) == FILES
    assert hub.ranges_of("model.safetensors") == [f"bytes={len(WEIGHTS) // 2}-"]


def test_partial_files_of_another_commit_are_dropped(hub: StubHub, tmp_path: Path) -> None:
    hub.files["old.json"] = b"old"
    interrupt(fetch(tmp_path), WEIGHTS[:1000])
    hub.commit, hub.files = "d" * 40, {**FILES, "model.safetensors": WEIGHTS[:-1] + b"y"}
    assert contents(fetch(tmp_path)) == hub.files


def test_two_processes_download_once_and_the_second_reports_that_it_waits(
    hub: StubHub, tmp_path: Path
) -> None:
    hub.held = threading.Event()
    first = start(tmp_path)
    wait(lambda: hub.ranges_of("model.safetensors"))
    second = start(tmp_path)
    assert second.stderr is not None
    assert "waiting for another process that fetches it" in second.stderr.readline()
    hub.held.set()
    outs = [process.communicate(timeout=DEADLINE_S) for process in (first, second)]
    assert [out for out, _ in outs] == [f"{tmp_path / 'org--model'}\n"] * 2
    assert "already fetched" in outs[1][1]
    assert len(hub.ranges_of("model.safetensors")) == 1
    assert contents(tmp_path / "org--model") == FILES


def test_a_waiting_process_takes_over_when_the_first_one_dies(hub: StubHub, tmp_path: Path) -> None:
    hub.held = threading.Event()
    first = start(tmp_path)
    wait(lambda: hub.ranges_of("model.safetensors"))
    second = start(tmp_path)
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.communicate()
    hub.held.set()
    second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0
    assert contents(tmp_path / "org--model") == FILES


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "source", "message"),
    [
        ({"token": "t"}, "hf://org/model", "(401): the model does not exist, or it needs a token"),
        ({"refuses": 403}, "hf://org/model", "HF_TOKEN (in an InferencePool, model.secretRef)"),
        ({}, "hf://org/model@v9", "has no hf://org/model@v9 (404): check the name and the rev"),
        ({}, "hf://org/other", "has no hf://org/other (404): check the name"),
        ({"refuses": 503}, "hf://org/model", "cannot provide hf://org/model: HTTP 503"),
        ({"refuses": 418}, "hf://org/model", "refuses hf://org/model: HTTP 418"),
        ({"files": {"config.json": b"{}"}}, "hf://org/model", "has no tokenizer.json"),
        ({"files": {"tokenizer.json": b"{}"}}, "hf://org/model", "--no-weights fetches the rest"),
        ({"claimed_sizes": {"config.json": 1 << 60}}, "hf://org/model", "free disk space"),
        ({"claimed_sizes": {"config.json": 9999}}, "hf://org/model", "instead of 9999"),
        ({"claimed_sizes": {"config.json": 3}}, "hf://org/model", "instead of 3"),
    ],
)
def test_a_refused_fetch_is_a_one_line_error(
    hub: StubHub, tmp_path: Path, change: dict[str, Any], source: str, message: str
) -> None:
    vars(hub).update(change)
    with pytest.raises(CommandError) as caught:
        fetch(tmp_path, source)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert fetch_of(tmp_path, source).folder.complete() is None


@pytest.mark.parametrize(("room", "fits"), [(2 << 20, False), (3 << 20, True)])
def test_a_model_larger_than_its_storage_is_refused_before_the_download(
    hub: StubHub, tmp_path: Path, room: int, fits: bool
) -> None:
    hub.files["model.safetensors"] = WEIGHTS
    fetching = fetch_of(tmp_path, room=room).run()
    if fits:
        asyncio.run(fetching)
        return
    message = "needs 1 MiB, but --room allows 2 MiB: .*model.storage"
    with pytest.raises(CommandError, match=message):
        asyncio.run(fetching)
    assert not list(tmp_path.rglob("model.safetensors*"))


def test_an_unreachable_hub_is_named_in_the_error(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CommandError, match=r"^http://127.0.0.1:1 cannot provide hf://org/model: "):
        fetch(tmp_path, pauses_s=(0.01,))


def test_a_hub_that_cannot_be_connected_to_is_given_up_sooner_than_one_that_answered(
    hub: StubHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CommandError):
        fetch(tmp_path, pauses_s=(0.01,) * 9)
    assert sum("trying again" in message for message in caplog.messages) == FIRST_RETRIES


def test_a_failed_write_is_a_one_line_error(hub: StubHub, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        process = start(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert stderr.count("\n") == 1
    assert "org--model" in stderr
    assert "File too large" in stderr


def test_a_folder_that_cannot_be_created_is_named_in_the_error(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["model", "fetch", "hf://org/model", f"--to={tmp_path / 'file'}"]) == 1
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "to", "message"),
    [
        ("org/model", "/x", "write hf://ORG/NAME"),
        ("pvc://claim/x", "/x", "is not a hub model"),
        ("hf://org/model", "", "--to is missing"),
    ],
)
def test_an_invalid_source_or_target_is_a_usage_error(source: str, to: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_fetch(FetchOptions(source=source, to=to), {})


def test_an_endpoint_that_is_no_url_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT 'hub' is not a URL"):
        make_fetch(FetchOptions(source="hf://a/b", to="/x"), {"HF_ENDPOINT": "hub"})


# --- reports --------------------------------------------------------------------------------------


async def test_fetch_reports_its_progress_to_the_index(hub: StubHub, tmp_path: Path) -> None:
    hub.held = threading.Event()
    total = sum(map(len, FILES.values()))
    with EmbeddedStore(64 << 20) as store:
        flags = {"node": "n-1", "pool": "p", "redis_index": store.index_url}
        running = asyncio.create_task(fetch_of(tmp_path, **flags).run())
        async with Registry(store.index_url, "p") as registry, asyncio.timeout(DEADLINE_S):
            reports: list[FetchReport] = []
            while not reports or not reports[0].done_bytes:
                reports = await registry.fetches()
                await asyncio.sleep(0.02)
            assert (reports[0].node, reports[0].source) == ("n-1", "hf://org/model")
            assert reports[0].total_bytes == total
            assert 0 < reports[0].done_bytes < total
            hub.held.set()
            await running
            assert [report.done_bytes for report in await registry.fetches()] == [total]


def test_a_fetch_goes_on_while_the_index_is_down(hub: StubHub, tmp_path: Path) -> None:
    down = fetch_of(tmp_path, redis_index="unix:///nowhere/index.sock")
    asyncio.run(down.run())
    assert contents(down.folder.path) == FILES


def test_progress_is_shown_as_share_rate_and_seconds_left() -> None:
    assert show_progress(0, 0, 0, 5.0) == "the hub has not reported the size yet"
    line = show_progress(512 << 20, 2 << 30, 256 << 20, 4.0)
    assert line == "512 MiB of 2.0 GiB (25 %), 64 MiB/s, 24 s left"


def test_fetch_imports_neither_torch_nor_huggingface_hub(hub: StubHub, tmp_path: Path) -> None:
    code = (
        "import sys; from baton_cli.main import main;"
        f"main(['model', 'fetch', 'hf://org/model', '--to={tmp_path}']);"
        "print([name for name in ('torch', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
