"""Server settings: which ones are wanted, and applying them to real servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_settings import StoreRole, tend, wanted_settings
from baton_kvstore.connection.server_usage import read_usage
from baton_kvstore.embedded.servers import EmbeddedServers, ServerSpec
from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.markers import Index
from baton_kvstore.settings import check_reachable
from baton_protocol.policies import StoreCare
from tests.support.stores.kvstore import PATIENCE_S, held_down, plain_client, wait_until
from tests.support.stores.redis_builds import BUILDS, redis_server

pytestmark = pytest.mark.integration

MIB = 1 << 20
VALUE = 4 * MIB
GOOD_DATA: Mapping[str, str | None] = {
    "save": "",
    "appendonly": "no",
    "maxmemory": str(1 << 30),
    "maxmemory-policy": "volatile-ttl",
    "maxmemory-clients": "0",
    "client-output-buffer-limit": f"normal {16 * MIB} 0 0 slave 1 1 1 pubsub 1 1 1",
}
BUFFER_LIMIT = "client-output-buffer-limit"
Servers = Callable[..., EmbeddedServers]


@pytest.fixture(params=BUILDS)
def misconfigured(request: pytest.FixtureRequest, make_servers: Servers) -> EmbeddedServers:
    """A server with settings that are all wrong for a data server."""
    spec = ServerSpec("misconfigured", 0, "noeviction", ("--appendonly", "yes"))
    servers = make_servers(spec, binary=redis_server(request.param))
    with plain_client(servers.url("misconfigured")) as client:
        client.config_set("save", "3600 1")
        client.config_set(BUFFER_LIMIT, "normal 0 0 0")
        if "maxmemory-clients" in client.config_get("maxmemory-*"):
            client.config_set("maxmemory-clients", "0")
    return servers


@contextmanager
def connected(url: str) -> Iterator[RespConnection]:
    connection = RespConnection(parse_endpoint(url))
    connection.open(time.monotonic() + PATIENCE_S)
    yield connection
    connection.close()


def configure(url: str, role: StoreRole, mode: StoreCare, value_bytes: int = VALUE) -> None:
    with connected(url) as connection:
        tend(connection, time.monotonic() + PATIENCE_S, role, mode, value_bytes)


def settings_of(url: str) -> dict[str, str]:
    with plain_client(url) as client:
        return dict(client.config_get("*"))


def as_user(url: str, *commands: str) -> str:
    """Return the URL of the same server for a user that may run everything but CONFIG, plus
    `commands`."""
    with plain_client(url) as client:
        client.acl_setuser(
            "me",
            enabled=True,
            passwords=["+secret"],
            keys=["*"],
            categories=["+@all"],
            commands=["-config", *commands],
        )
    return url.replace("unix://", "unix://me:secret@")


@pytest.mark.parametrize(
    ("role", "changes", "commands"),
    [
        ("data", {}, []),
        ("data", {"save": "60 1"}, ['CONFIG SET save ""']),
        ("data", {"appendonly": "yes"}, ["CONFIG SET appendonly no"]),
        ("data", {"maxmemory-policy": "noeviction"}, ["CONFIG SET maxmemory-policy volatile-ttl"]),
        ("data", {"maxmemory-policy": "allkeys-lru"}, []),
        ("data", {"maxmemory-policy": "volatile-lfu"}, []),
        ("data", {"maxmemory": "0"}, ["CONFIG SET maxmemory BYTES"]),
        # 64 clients with 2.5 values of 4 MiB each: 640 MiB.
        ("data", {"maxmemory-clients": str(640 * MIB)}, []),
        ("data", {"maxmemory-clients": str(639 * MIB)}, ["CONFIG SET maxmemory-clients 0"]),
        ("data", {"maxmemory-clients": "63%"}, []),
        ("data", {"maxmemory-clients": "62%"}, ["CONFIG SET maxmemory-clients 0"]),
        (
            "data",
            {"maxmemory": str(1280 * MIB), "maxmemory-clients": "10%"},
            ["CONFIG SET maxmemory-clients 50%"],
        ),
        ("data", {"maxmemory": str(1280 * MIB), "maxmemory-clients": "0"}, []),
        ("data", {"maxmemory": str(6400 * MIB), "maxmemory-clients": "10%"}, []),
        (
            "data",  # without maxmemory, a percentage is no limit
            {"maxmemory": "0", "maxmemory-clients": "1%"},
            ["CONFIG SET maxmemory BYTES"],
        ),
        ("index", {"maxmemory-policy": "noeviction"}, []),
        ("index", {"maxmemory-policy": "noeviction", "maxmemory": "0"}, []),
        ("index", {"maxmemory-policy": "noeviction", "maxmemory-clients": "0"}, []),
        ("index", {}, ["CONFIG SET maxmemory-policy noeviction"]),
        ("index", {"maxmemory-policy": "allkeys-lru", "save": "1 1"}, ["save", "noeviction"]),
    ],
)
def test_wanted_settings_of_each_role(
    role: StoreRole, changes: dict[str, str], commands: list[str]
) -> None:
    lines = [wanted.line for wanted in wanted_settings(role, {**GOOD_DATA, **changes}, VALUE)]
    assert len(lines) == len(commands)
    for line, command in zip(lines, commands, strict=True):
        assert command in line


@pytest.mark.parametrize(
    ("now", "value_bytes", "line"),
    [
        ("normal 0 0 0 slave 9 9 9", VALUE, f'CONFIG SET {BUFFER_LIMIT} "normal {16 * MIB} 0 0"'),
        ("normal 0 0 0 slave 9 9 9", 8 * MIB, f'CONFIG SET {BUFFER_LIMIT} "normal {24 * MIB} 0 0"'),
        (f"slave 9 9 9 normal {8 * MIB} 0 0", VALUE, ""),
        (f"normal 0 {8 * MIB} 60 slave 9 9 9", VALUE, ""),
        (
            f"normal {9 * MIB} {7 * MIB} 60",
            VALUE,
            f'CONFIG SET {BUFFER_LIMIT} "normal {16 * MIB} 0 0"',
        ),
        (f"normal {16 * MIB} 0 0", 16 * MIB, f'CONFIG SET {BUFFER_LIMIT} "normal {48 * MIB} 0 0"'),
        (f"normal {100 * MIB} 0 0", VALUE, ""),
    ],
)
@pytest.mark.parametrize("all_clients", [None, "0", "80%"])
def test_the_limit_per_client_leaves_room_for_two_values(
    now: str, value_bytes: int, line: str, all_clients: str | None
) -> None:
    settings = {
        **GOOD_DATA,
        "maxmemory": str(8 << 30),
        "maxmemory-clients": all_clients,
        BUFFER_LIMIT: now,
    }
    if all_clients is None:  # an older server
        del settings["maxmemory-clients"]
    lines = [wanted.line for wanted in wanted_settings("data", settings, value_bytes)]
    assert lines == ([line] if line else [])


def test_settings_unknown_to_the_server_are_not_wanted() -> None:
    assert wanted_settings("data", {}, VALUE) == ()
    assert wanted_settings("index", {}, VALUE) == ()


def test_settings_that_the_server_does_not_show_are_wanted() -> None:
    by_name = {
        wanted.name: wanted for wanted in wanted_settings("data", dict.fromkeys(GOOD_DATA), VALUE)
    }
    assert by_name.keys() == {"save", "appendonly", "maxmemory-policy", BUFFER_LIMIT}
    assert {wanted.was for wanted in by_name.values()} == {"not shown"}


def test_apply_changes_a_misconfigured_data_server_once_and_logs_each_change(
    misconfigured: EmbeddedServers, caplog: pytest.LogCaptureFixture
) -> None:
    url = misconfigured.url("misconfigured")
    caplog.set_level("INFO")
    configure(url, "data", "apply")
    settings = settings_of(url)
    assert (settings["save"], settings["appendonly"]) == ("", "no")
    assert settings["maxmemory-policy"] == "volatile-ttl"
    assert settings.get("maxmemory-clients") in (None, "0")
    assert f"normal {16 * MIB} 0 0" in settings[BUFFER_LIMIT]
    change, warning = messages(caplog)
    for name in ("save '' (was '3600 1')", "appendonly 'no' (was 'yes')", "maxmemory-policy"):
        assert name in change
    assert "CONFIG SET maxmemory BYTES" in warning
    assert "appendonly" not in warning
    caplog.clear()
    with plain_client(url) as client:
        client.config_set("maxmemory", 1 << 30)
    configure(url, "data", "apply")
    assert messages(caplog) == []


def test_check_changes_nothing_and_logs_every_command(
    misconfigured: EmbeddedServers, caplog: pytest.LogCaptureFixture
) -> None:
    url = misconfigured.url("misconfigured")
    before = settings_of(url)
    configure(url, "data", "check")
    assert settings_of(url) == before
    (warning,) = messages(caplog)
    for line in ('save ""', "appendonly no", "maxmemory-policy volatile-ttl", "maxmemory BYTES"):
        assert f"CONFIG SET {line} (now " in warning


def test_a_user_without_config_rights_gets_one_warning_with_the_commands(
    misconfigured: EmbeddedServers, caplog: pytest.LogCaptureFixture
) -> None:
    url = misconfigured.url("misconfigured")
    before = settings_of(url)
    configure(as_user(url), "data", "apply")
    assert settings_of(url) == before
    (warning,) = messages(caplog)
    assert "NOPERM" in warning
    assert "secret" not in warning
    # INFO, which every user may run, shows these two.
    assert "CONFIG SET appendonly no (now 'yes'" in warning
    assert "CONFIG SET maxmemory-policy volatile-ttl (now 'noeviction'" in warning
    assert 'CONFIG SET save "" (now not shown' in warning


def test_a_user_with_read_only_config_rights_gets_only_the_settings_that_differ(
    misconfigured: EmbeddedServers, caplog: pytest.LogCaptureFixture
) -> None:
    url = misconfigured.url("misconfigured")
    with plain_client(url) as client:
        client.config_set("save", "")
    configure(as_user(url, "+config|get"), "data", "apply")
    (warning,) = messages(caplog)
    assert "NOPERM" in warning
    assert "CONFIG SET appendonly no (now 'yes'" in warning
    assert "CONFIG SET save" not in warning


def test_usage_matches_the_servers_own_figures(make_servers: Servers) -> None:
    url = make_servers(ServerSpec("small", 3 * MIB, "allkeys-lru")).url("small")
    with connected(url) as connection, plain_client(url) as client:
        before = read_usage(connection, time.monotonic() + PATIENCE_S)
        assert (before.limit_bytes, before.evicted_keys) == (3 * MIB, 0)
        for number in range(40):
            client.set(f"key {number}", bytes(100_000))
        after = read_usage(connection, time.monotonic() + PATIENCE_S)
        info: dict[str, Any] = client.info("stats")
    assert before.used_bytes < after.used_bytes <= 3 * MIB
    assert after.evicted_keys == info["evicted_keys"] > 0


@pytest.mark.parametrize("build", BUILDS)
async def test_an_index_that_evicts_is_reconfigured_after_each_start(
    build: str, make_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ServerSpec("index", 64 * MIB, "allkeys-lru", ("--appendonly", "yes"))
    servers = make_servers(spec, binary=redis_server(build))
    url = servers.url("index")
    caplog.set_level("INFO")
    async with Index(url, "pool") as index:
        await index.tend("check")
        assert settings_of(url)["maxmemory-policy"] == "allkeys-lru"
        for _ in range(2):
            await index.tend("apply")
            await index.tend("apply")
            settings = settings_of(url)
            assert (settings["maxmemory-policy"], settings["appendonly"]) == ("noeviction", "no")
            with held_down(servers, "index"):
                pass
            wait_until(lambda: answers(url), "the index to be back")
    levels = [record.levelname for record in caplog.records if "index server" in record.message]
    assert levels == ["WARNING", "INFO", "INFO"]


async def test_an_index_that_refuses_config_is_used_unchanged(
    make_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    url = make_servers(ServerSpec("index", 64 * MIB, "allkeys-lru")).url("index")
    async with Index(as_user(url), "pool") as index:
        await index.tend("apply")
        await index.ping()
    (warning,) = messages(caplog)
    assert "CONFIG SET maxmemory-policy noeviction (now 'allkeys-lru'" in warning


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.name == "baton_kvstore.connection.server_settings"
    ]


def answers(url: str) -> bool:
    try:
        return bool(check_reachable(url).run_id)
    except StoreUnavailable:
        return False
