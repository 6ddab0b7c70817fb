"""Logins given by variables: they work, and no command line and no log shows a secret."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from baton_cli.commands.role_settings import node_settings, router_settings
from baton_cli.commands.up import settle
from baton_cli.errors import CommandError
from baton_cli.options.records import NodeOptions, RouterOptions, UpOptions
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.embedded.servers import EmbeddedStore
from tests.support.clients.http import exchange
from tests.support.pools.baton_up import Pool
from tests.support.pools.one_role import WAIT_S, role, wait_ready
from tests.support.stores.kvstore import plain_client

PASSWORD = "p@ss/w:rd?#%41 ü,x"
TOKEN = "t0ken-of-the-pool"
SIM = ("--engine", "sim", "--chunk-blocks", "1")


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    """An embedded store whose default user needs PASSWORD."""
    with EmbeddedStore(64 << 20) as running:
        for url in (running.index_url, *running.data_urls):
            with plain_client(url) as admin:
                admin.config_set("requirepass", PASSWORD)
        yield running


def command_lines(pid: int) -> str:
    process = psutil.Process(pid)
    return "\n".join(" ".join(one.cmdline()) for one in (process, *process.children(True)))


@pytest.mark.integration
def test_a_pool_of_roles_logs_in_by_variables_and_shows_no_secret(store: EmbeddedStore) -> None:
    stores = {"BATON_REDIS_INDEX": store.index_url, "BATON_REDIS_DATA": ",".join(store.data_urls)}
    variables = {**stores, "BATON_REDIS_PASSWORD": PASSWORD, "BATON_LINK_TOKEN": TOKEN}
    log: list[str] = []
    pids: list[int] = []
    flags = ("--log-level", "debug")
    with (
        role("prefill", *SIM, *flags, log=log, pids=pids, **variables),
        role("decode", *SIM, *flags, log=log, pids=pids, **variables),
        role(
            "router", "--port=0", "--handoff=always", *flags, log=log, pids=pids, **variables
        ) as url,
    ):
        wait_ready(url)
        answer = exchange(url, "/v1/completions", {"prompt": "Hello " * 40, "max_tokens": 4})
        assert answer.status == 200
        nodes = exchange(url, "/pool").body["nodes"]
        assert [node["store"] for node in nodes] == ["up", "up"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S) as page:
            shown = page.read().decode() + json.dumps(nodes)
        shown += "\n".join(map(command_lines, pids))
    assert "baton_cli.engine_process" in shown
    shown += "".join(log)
    for secret in (PASSWORD, "p%40ss", TOKEN):
        assert secret not in shown


@pytest.mark.integration
def test_up_logs_in_to_the_user_s_redis_by_variables_and_leaves_it_running(
    store: EmbeddedStore,
) -> None:
    flags = [*SIM, "--redis-index", store.index_url, "--redis-data", ",".join(store.data_urls)]
    variables = {"BATON_REDIS_PASSWORD": PASSWORD, "BATON_LINK_TOKEN": TOKEN}
    with Pool(flags, environment=variables) as pool:
        assert exchange(pool.url, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
        assert {node["store"] for node in pool.pool()["nodes"]} == {"up"}
        assert list(pool.temporary.iterdir()) == []  # it starts no store
        shown = command_lines(pool.process.pid) + pool.log()
    assert store.is_alive
    assert "baton_cli.engine_process" in shown
    for secret in (PASSWORD, "p%40ss", TOKEN):
        assert secret not in shown


def test_a_login_applies_only_to_urls_without_one() -> None:
    options = NodeOptions(
        engine="sim",
        index_url="redis://i",
        data_urls=("redis://a", "redis://own:word@b"),
        redis_username="me",
        redis_password=PASSWORD,
    )
    settings = node_settings(options, "decode")
    logins = [
        (one.username, one.password)
        for one in map(parse_endpoint, (settings.index_url, *settings.data_urls))
    ]
    assert logins == [("me", PASSWORD), ("me", PASSWORD), ("own", "word")]
    index = router_settings(RouterOptions(index_url="redis://i", redis_password=PASSWORD))
    assert parse_endpoint(index.index_url).password == PASSWORD


def test_a_login_without_a_store_is_an_error_only_for_up() -> None:
    assert node_settings(NodeOptions(engine="sim", redis_password="x"), "decode").index_url == ""
    with pytest.raises(CommandError, match="give --redis-index and --redis-data too"):
        settle(UpOptions(engine="sim", redis_password="x"))


@pytest.mark.parametrize("token", ["two words", "tökén", "line\n"])
def test_an_invalid_link_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(CommandError, match="--link-token") as caught:
        router_settings(RouterOptions(nodes=("http://n",), link_token=token))
    assert token not in str(caught.value)
