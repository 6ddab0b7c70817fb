"""The embedded store of `baton up`, and its restart after its servers or guardian are killed."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from baton_cli.local_pool.store import OpenStore, StoreUrls, open_store
from baton_cli.options.records import UpOptions
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import ServerMissing
from tests.support.pools.baton_up import Pool
from tests.support.stores.kvstore import plain_client, wait_until
from tests.support.waiting import until

pytestmark = pytest.mark.integration

SIM = ["--engine", "sim", "--chunk-blocks", "1", "--kv-blocks", "500"]


def guardian_of(store: EmbeddedStore) -> psutil.Process:
    parent = psutil.Process(store.pid("index")).parent()
    assert parent is not None
    return parent


def store_limit(url: str) -> int:
    with plain_client(url) as client:
        return int(client.config_get("maxmemory")["maxmemory"])


def open_embedded(store: EmbeddedStore) -> OpenStore:
    return OpenStore(StoreUrls(store.index_url, store.data_urls), store)


@pytest.mark.parametrize("count", [1, 3])
def test_store_instances_share_the_store_memory(
    count: int,
) -> None:
    options = UpOptions(store_memory=96 << 20, store_instances=count)
    with open_store(options) as store:
        assert len(store.urls.data) == count
        limits = [store_limit(url) for url in store.urls.data]
    assert limits == [(96 << 20) // count] * count


async def test_a_store_with_a_killed_guardian_is_restarted_each_time() -> None:
    with EmbeddedStore(64 << 20) as store:
        notes: list[str] = []
        keeper = asyncio.create_task(open_embedded(store).keep(notes.append))
        for kills in (1, 2):
            before = store.pid("index")
            guardian_of(store).kill()
            await until(lambda: len(notes) == kills)  # noqa: B023
            await until(lambda: store.pid("index") != before)  # noqa: B023
            assert store.is_alive
        keeper.cancel()
    assert notes[0].startswith(
        "the store's guardian and its servers (index, data0) were killed; restarting them in "
    )


@pytest.mark.parametrize("name", ["index", "data1"])
async def test_only_the_killed_server_is_restarted_and_it_is_named(name: str) -> None:
    with EmbeddedStore(64 << 20, data_instances=2) as store:
        notes: list[str] = []
        keeper = asyncio.create_task(open_embedded(store).keep(notes.append))
        for kills in (1, 2):
            before = {server: store.pid(server) for server in store.names}
            os.kill(before[name], signal.SIGKILL)
            await until(lambda: len(notes) == kills)  # noqa: B023
            await until(lambda: store.pid(name) != before[name])  # noqa: B023
            after = {server: store.pid(server) for server in store.names}
            assert {server for server in after if after[server] != before[server]} == {name}
            assert notes[-1] == (
                f"restarting the store's server {name} (pid {before[name]} was ended by SIGKILL)"
                " without its data"
            )
        keeper.cancel()


def test_a_socket_name_in_the_process_list_finds_only_its_server() -> None:
    with EmbeddedStore(64 << 20) as store:
        for name in store.names:
            socket = f"{name}.sock"
            pids = [
                process.pid
                for process in psutil.process_iter(["cmdline"])
                if str(store.folder) in " ".join(process.info["cmdline"] or [])
                and socket in " ".join(process.info["cmdline"] or [])
            ]
            assert pids == [store.pid(name)]


async def test_a_failed_store_restart_is_retried() -> None:
    class Broken(EmbeddedStore):
        broken = True

        def revive(self) -> None:
            if self.broken:
                self.broken = False
                raise ServerMissing("no redis-server any more")
            super().revive()

    with Broken(64 << 20) as store:
        notes: list[str] = []
        keeper = asyncio.create_task(open_embedded(store).keep(notes.append))
        guardian_of(store).kill()
        await until(lambda: "cannot start the store: no redis-server any more" in notes)
        await until(lambda: store.is_alive)
        keeper.cancel()


def test_nodes_use_a_killed_store_again_after_its_restart() -> None:
    with Pool([*SIM, "--prefill", "1", "--decode", "1"]) as pool:
        [guardian] = [
            process
            for process in pool.processes()
            if "embedded.guardian" in " ".join(process.cmdline())
        ]
        servers = guardian.children()
        os.kill(guardian.pid, signal.SIGKILL)
        psutil.wait_procs(servers, timeout=120)
        pool.wait(lambda: "the store's guardian and its servers" in pool.log(), "notice it")
        back = "the store's index can be used again"
        pool.wait(lambda: pool.log().count(back) >= 2, "use it again in both nodes")
        wait_until(lambda: len(pool.pool()["nodes"]) == 2, "both nodes")


def test_a_pool_reports_its_chunk_size_at_its_start() -> None:
    with Pool([*SIM, "--prefill", "0", "--decode", "1", "--store-instances", "2"]) as pool:
        line = "chunks: 1 block of 16 tokens, 8 KiB, 25.0 % lost to the store's allocator"
        assert line in pool.log().splitlines()
        [node] = pool.pool()["nodes"]
        assert len(node["instances"]) == 2
