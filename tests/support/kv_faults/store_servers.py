"""The servers of a KV fault testbed, which tests share: repaired and emptied between two tests.

In: the number of data servers. Out: a FaultyStore that can also be restarted and reset.
"""

from __future__ import annotations

import redis

from tests.support.stores.kvstore import plain_client, wait_until
from tests.support.stores.store_faults import FaultyStore, which

STORE_BYTES = 128 << 20


class KVServers(FaultyStore):
    def __init__(self, data_servers: int = 1) -> None:
        super().__init__(STORE_BYTES, data_servers=data_servers)

    def redis(self, server: str) -> redis.Redis:
        return plain_client(self.servers.url(server))

    def break_servers(self, act: str, *servers: str) -> None:
        """Call the method `act` of this object on each server."""
        for server in servers:
            getattr(self, act)(which(server))

    def restart(self, server: str) -> None:
        """Kill a server, and return when it runs again, empty."""
        before = self.servers.pid(server)
        self.kill(which(server))
        wait_until(lambda: self.servers.pid(server) != before, "the server's restart")
        self.await_up()

    def mend(self) -> None:
        super().mend()
        for server in self.names("both"):
            with self.redis(server) as client:
                client.config_set("maxmemory", STORE_BYTES)

    def reset(self) -> None:
        """Bring the servers into the state of new ones."""
        self.mend()
        for server in self.names("both"):
            with self.redis(server) as client:
                client.flushall()
                client.config_set("maxmemory-samples", 10)
                policy = "noeviction" if server == "index" else "volatile-ttl"
                client.config_set("maxmemory-policy", policy)
                client.config_resetstat()
