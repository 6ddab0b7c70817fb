"""A table of broken stores: doctor finds each, its advice repairs it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_cli.doctor.examination import examine
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.options import DoctorOptions
from baton_kvstore.embedded.redis_binary import find_redis_server
from baton_kvstore.embedded.servers import EmbeddedStore
from tests.cli.doctor.setups import (
    PATIENCE,
    Setup,
    check_repaired,
    find,
    names_of,
    run_redis_command,
    set_config,
    used_bytes,
)
from tests.support.project.command import baton
from tests.support.stores.kvstore import frozen, plain_client, wait_until
from tests.support.wires.link_proxy import LinkProxy
from tests.support.wires.tls import make_certificate, tls_before
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

HOUR_S = 3600.0
END_S = 60.0
OLD_INFO = b"run_id:abc\r\nredis_version:5.0.7\r\n"
Row = Callable[[EmbeddedStore, Path], AbstractContextManager[Setup]]


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(256 << 20, data_instances=2) as running:
        yield running


def flags_of(store: EmbeddedStore) -> dict[str, Any]:
    return {"index": store.index_url, "data": store.data_urls}


def wrong_setting(server: str, found: str, remedy: str, settings: dict[str, str], name: str) -> Row:
    """A row of a server whose setting the advised command corrects."""

    @contextmanager
    def row(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
        url = store.url(server)
        set_config(url, settings)
        follow = run_redis_command(url)
        yield Setup(check="store", flags=flags_of(store), found=found, remedy=remedy, follow=follow)

    row.__name__ = name
    return row


@contextmanager
def _an_index_that_is_full(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    with plain_client(store.index_url) as client:
        client.set("junk", b"x" * (16 << 20))
    with plain_client(store.index_url) as client:  # the buffer of the one before counted, too
        client.config_set("maxmemory", used_bytes(client) * 101 // 100)
    yield Setup(
        check="store",
        flags=flags_of(store),
        found="index: ",
        remedy="CONFIG SET maxmemory ",
        follow=run_redis_command(store.index_url),
    )


@contextmanager
def _data_that_is_the_index(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    yield Setup(
        check="store",
        flags={"index": store.url("data0"), "data": (f"{store.url('data0')}?db=1",)},
        found="index and data are the same server",
        remedy="write another server for one of them",
        follow=lambda finding: flags_of(store),
    )


@contextmanager
def _data_that_is_the_index_under_another_name(
    store: EmbeddedStore, folder: Path
) -> Iterator[Setup]:
    alias = folder / "alias.sock"
    alias.symlink_to(store.index_url.removeprefix("unix://"))
    yield Setup(
        check="store",
        flags={"index": store.index_url, "data": (f"unix://{alias}",)},
        found="index and data are the same server",
        remedy="write another server for one of them",
        follow=lambda finding: flags_of(store),
    )


@contextmanager
def _one_data_server_under_two_names(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    alias = folder / "alias.sock"
    alias.symlink_to(store.data_urls[0].removeprefix("unix://"))
    yield Setup(
        check="store",
        flags=flags_of(store) | {"data": (store.data_urls[0], f"unix://{alias}")},
        found="lead to the same server",
        remedy="leave one out",
        follow=lambda finding: {"data": store.data_urls[:1]},
    )


@contextmanager
def _a_dead_data_server(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    started: list[subprocess.Popen[bytes]] = []
    place = folder / "d.sock"

    def follow(finding: Finding) -> None:
        [command] = finding.commands
        words = shlex.split(command)
        assert words[0] == "redis-server"
        words[0] = str(find_redis_server())
        started.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=folder))
        wait_until(place.exists, "the server to listen")

    try:
        yield Setup(
            check="store",
            flags=flags_of(store) | {"data": (*store.data_urls, f"unix://{place}")},
            found="No such file or directory",
            remedy="redis-server --port 0 --unixsocket",
            follow=follow,
        )
    finally:
        for process in started:
            process.kill()
            process.wait(END_S)


@contextmanager
def _a_server_that_accepts_and_never_answers(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    pid = store.pid("data0")
    with frozen(pid):
        yield Setup(
            check="store",
            flags=flags_of(store),
            found="did not answer in time",
            remedy="see whether the server is frozen",
            host=Host(),
            follow=lambda finding: os.kill(pid, signal.SIGCONT),
        )


@contextmanager
def fake_server(reply: bytes) -> Iterator[str]:
    """A server that answers everything with this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    link.recv(4096)
                    link.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(END_S)


@contextmanager
def _an_old_redis(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    with fake_server(b"$%d\r\n%b\r\n" % (len(OLD_INFO), OLD_INFO)) as url:
        yield Setup(
            check="store",
            flags=flags_of(store) | {"index": url},
            found="OLD Redis 5.0.7",
            remedy="start a newer Redis",
            follow=lambda finding: flags_of(store),
        )


@contextmanager
def _a_server_that_is_no_redis(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    with fake_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        yield Setup(
            check="store",
            flags=flags_of(store) | {"index": url},
            found="index: ",
            remedy="name a Redis server",
            follow=lambda finding: flags_of(store),
        )


@contextmanager
def with_tls(store: EmbeddedStore, certificate: Path) -> Iterator[str]:
    """HOST:PORT of the index behind TLS."""
    loop = WireLoop()
    try:
        with tls_before(loop, store.index_url, certificate) as address:
            yield address
    finally:
        loop.close()


@contextmanager
def _a_certificate_of_an_unknown_authority(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    certificate = make_certificate(folder)
    with with_tls(store, certificate) as address:
        url = f"rediss://{address}"
        yield Setup(
            check="store",
            flags={"index": url},
            found="certificate verify failed",
            remedy="ssl_ca_certs",
            follow=lambda finding: {"index": f"{url}?ssl_ca_certs={certificate}"},
        )


@contextmanager
def _a_server_with_tls_and_a_url_without(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    certificate = make_certificate(folder)
    with with_tls(store, certificate) as address:
        url = f"rediss://{address}?ssl_ca_certs={certificate}"
        yield Setup(
            check="store",
            flags={"index": f"redis://{address}"},
            found=f"redis://{address}",
            remedy="rediss://",
            follow=lambda finding: {"index": url},
        )


@contextmanager
def _a_wrong_password(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    set_config(store.index_url, {"requirepass": "right"})
    yield Setup(
        check="store",
        flags=flags_of(store) | {"index": store.index_url.replace("//", "//:wrong@")},
        found="WRONGPASS",
        remedy="check the login in the URL",
        follow=lambda finding: {"index": store.index_url.replace("//", "//:right@")},
    )


@contextmanager
def _no_password(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    set_config(store.index_url, {"requirepass": "right"})
    yield Setup(
        check="store",
        flags=flags_of(store),
        found="NOAUTH",
        remedy="--redis-password",
        follow=lambda finding: {"index": store.index_url.replace("//", "//:right@")},
    )


@contextmanager
def _a_clock_that_is_an_hour_behind(store: EmbeddedStore, folder: Path) -> Iterator[Setup]:
    yield Setup(
        check="clock",
        flags={"index": store.index_url},
        found="s ahead of this machine's",
        remedy="time service",
        follow=lambda finding: Host(),
        host=Host(clock=lambda: time.time() - HOUR_S, patience=PATIENCE),
    )


ROWS: list[Row] = [
    wrong_setting(
        "index",
        "index: unix://",
        "CONFIG SET maxmemory-policy noeviction",
        {"maxmemory-policy": "allkeys-lru"},
        "an_index_that_evicts",
    ),
    wrong_setting(
        "index",
        "has maxmemory '0'",
        "CONFIG SET maxmemory ",
        {"maxmemory": "0"},
        "an_index_without_a_limit",
    ),
    wrong_setting(
        "index", "has save '60 1'", 'CONFIG SET save ""', {"save": "60 1"}, "an_index_that_saves"
    ),
    wrong_setting(
        "data0",
        "has maxmemory-policy 'noeviction'",
        "CONFIG SET maxmemory-policy volatile-ttl",
        {"maxmemory-policy": "noeviction"},
        "data_that_never_evicts",
    ),
    wrong_setting(
        "data1",
        "has maxmemory '0'",
        "CONFIG SET maxmemory ",
        {"maxmemory": "0"},
        "data_without_a_limit",
    ),
    wrong_setting(
        "data0",
        "has client-output-buffer-limit",
        "CONFIG SET client-output-buffer-limit",
        {"client-output-buffer-limit": "normal 0 0 0"},
        "data_without_a_limit_of_replies",
    ),
    _an_index_that_is_full,
    _data_that_is_the_index,
    _data_that_is_the_index_under_another_name,
    _one_data_server_under_two_names,
    _a_dead_data_server,
    _a_server_that_accepts_and_never_answers,
    _an_old_redis,
    _a_server_that_is_no_redis,
    _a_certificate_of_an_unknown_authority,
    _a_server_with_tls_and_a_url_without,
    _a_wrong_password,
    _no_password,
    _a_clock_that_is_an_hour_behind,
]


@pytest.mark.parametrize("row", ROWS, ids=names_of(ROWS))
def test_doctor_finds_a_broken_store_and_its_advice_repairs_it(
    row: Row, store: EmbeddedStore, tmp_path: Path
) -> None:
    with row(store, tmp_path) as setup:
        finding = find(setup)
        check_repaired(setup, setup.follow(finding))


def test_a_sound_store_is_clean_measured_and_unchanged(store: EmbeddedStore) -> None:
    before = [plain_contents(url) for url in (store.index_url, *store.data_urls)]
    found = examine(DoctorOptions(**flags_of(store)), Host(patience=PATIENCE))
    of_store = [each for each in found if each.check in ("store", "clock", "bandwidth")]
    assert {each.severity for each in of_store} <= {"ok", "note"}  # a busy machine is slow
    assert sum("GB/s" in each.found for each in of_store) == 2  # of each data server
    assert [plain_contents(url) for url in (store.index_url, *store.data_urls)] == before


def plain_contents(url: str) -> tuple[list[bytes], dict[str, str]]:
    with plain_client(url) as client:
        return sorted(client.keys()), dict(client.config_get("*"))


def test_a_full_data_server_is_not_filled_with_a_measurement(store: EmbeddedStore) -> None:
    url = store.data_urls[0]
    with plain_client(url) as client:
        client.config_set("maxmemory", used_bytes(client) + (8 << 20))
        client.set("kept", b"x" * (2 << 20), ex=100)
    found = examine(DoctorOptions(data=(url,)), Host(patience=PATIENCE))
    [note] = [each for each in found if each.check == "bandwidth"]
    assert note.found.startswith("not measured: ")
    with plain_client(url) as client:
        assert client.keys() == [b"kept"]
        assert int(client.info("stats")["evicted_keys"]) == 0


def test_a_password_is_in_no_line(store: EmbeddedStore) -> None:
    secret = "".join(("se", "cret"))
    url = store.index_url.replace("//", f"//:{secret}@")
    for flags in (["--index", url], ["--index", f"redis://:{secret}@127.0.0.1:1", "--json"]):
        done = baton("doctor", *flags)
        assert "store" in done.stdout
        assert secret not in done.stdout + done.stderr


def test_servers_that_hang_cost_one_deadline_together(store: EmbeddedStore) -> None:
    loop = WireLoop()
    links = [LinkProxy(loop, url) for url in (store.index_url, *store.data_urls)]
    try:
        for link in links:
            link.hold()
        done = baton("doctor", "--index", links[0].url, "--data", links[1].url, links[2].url)
    finally:
        for link in links:
            link.close()
        loop.close()
    assert done.returncode == 1
    assert done.stdout.count("did not answer in time") == len(links)


def test_an_up_that_cannot_reach_its_redis_gives_doctor_s_advice(store: EmbeddedStore) -> None:
    dead = "redis://127.0.0.1:1"
    flags = ("--redis-index", dead, "--redis-data", store.data_urls[0])
    done = baton("up", "--engine", "sim", "--port", "0", *flags)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "; start it there: redis-server --port 1 " in line


def test_an_up_with_one_server_under_two_names_is_refused(
    store: EmbeddedStore, tmp_path: Path
) -> None:
    alias = tmp_path / "alias.sock"
    alias.symlink_to(store.index_url.removeprefix("unix://"))
    flags = ("--redis-index", store.index_url, "--redis-data", f"unix://{alias}")
    done = baton("up", "--engine", "sim", "--port", "0", *flags)
    assert done.returncode == 1
    assert "index and data are the same server" in done.stderr


def test_a_url_that_is_none_is_a_wrong_flag() -> None:
    done = baton("doctor", "--index", "http://127.0.0.1:6379")
    assert (done.returncode, done.stdout) == (2, "")
    assert "use unix://, redis:// or rediss://" in done.stderr
