"""Leases on the index: of all routers of a pool, one at a time does a piece of work.

A lease expires unless its holder renews it, so the work of a dead holder is free after the lease's
time. A holder that pauses for longer may find another holder: work under a lease must be safe when
two do it for a moment.

Each method raises StoreUnavailable if the index fails. Use one Leases per event loop.
"""

from __future__ import annotations

from baton_kvstore.connection.client import OPERATION_TIMEOUT_S, AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.keys import lease_key

# KEYS: the lease. ARGV: holder, milliseconds. 1: the holder has it now.
_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Leases(ClosesItself):
    """The leases of one pool. `holder` identifies this process; no other may have the same."""

    def __init__(
        self, url: str, pool: str, holder: str, *, timeout_s: float = OPERATION_TIMEOUT_S
    ) -> None:
        self._pool = pool
        self._holder = holder
        self._client = AsyncClient(parse_endpoint(url), timeout_s=timeout_s, max_connections=2)
        self._hold = self._client.redis.register_script(_HOLD)
        self._release = self._client.redis.register_script(_RELEASE)

    async def close(self) -> None:
        await self._client.close()

    async def hold(self, name: str, ttl_s: float) -> bool:
        """Take the lease, or renew it, for `ttl_s` seconds. False: another process holds it."""
        args = [self._holder, max(1, int(ttl_s * 1000))]
        keys = [lease_key(self._pool, name)]
        return bool(await self._client.call(self._hold(keys=keys, args=args)))

    async def release(self, name: str) -> None:
        """Give the lease back. No effect if another process holds it."""
        keys = [lease_key(self._pool, name)]
        await self._client.call(self._release(keys=keys, args=[self._holder]))
