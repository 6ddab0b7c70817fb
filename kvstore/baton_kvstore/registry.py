"""Who is there: node reports with a TTL on the index, for discovery.

A node registers again and again (a heartbeat); a router lists. Time is the index's own (TIME), so
that nodes with wrong clocks expire like others. In: `NodeReport`. Out: reports, or
StoreUnavailable. Use one Registry per event loop.
"""

from __future__ import annotations

import logging

from redis.exceptions import WatchError

from baton_kvstore.client import AsyncClient, ClosesItself
from baton_kvstore.endpoint import parse_endpoint
from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.keys import node_key, nodes_key
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import NodeReport
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)
DEFAULT_TTL_S = 3.0
UNREGISTER_TRIES = 3
_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000); "
_REGISTER = (
    _NOW
    + """
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], 86400000)
"""
)
# The keys of the reports follow from the set's members: the index is one server, never a cluster.
_NODES = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local found = {}
for _, node in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local report = redis.call('GET', KEYS[1] .. ':' .. node)
  if report then found[#found + 1] = report end
end
return found
"""
)


class Registry(ClosesItself):
    """The node registry of one pool."""

    def __init__(self, url: str, pool: str) -> None:
        self._pool = pool
        self._client = AsyncClient(parse_endpoint(url), max_connections=4)
        self._reports: Codec[NodeReport] = Codec(NodeReport)
        self._register = self._client.redis.register_script(_REGISTER)
        self._nodes = self._client.redis.register_script(_NODES)

    async def close(self) -> None:
        await self._client.close()

    async def register(self, report: NodeReport, ttl_s: float = DEFAULT_TTL_S) -> None:
        """Say that this node is there for `ttl_s` more seconds; replaces what it said before."""
        await self._client.call(
            self._register(
                keys=[nodes_key(self._pool), node_key(self._pool, report.node)],
                args=[report.node, self._reports.encode(report), max(1, int(ttl_s * 1000))],
            )
        )

    async def unregister(self, node: NodeId, epoch: Epoch) -> bool:
        """Leave. False, and no effect, if the registered epoch is not ours: another start of this
        node has registered since."""
        return await self._client.call(self._unregister(node, epoch))

    async def nodes(self) -> list[NodeReport]:
        """All that are registered and not expired, by node id."""
        values: list[bytes] = await self._client.call(self._nodes(keys=[nodes_key(self._pool)]))
        reports = [report for value in values if (report := self._read(value)) is not None]
        return sorted(reports, key=lambda report: report.node)

    async def _unregister(self, node: NodeId, epoch: Epoch) -> bool:
        key = node_key(self._pool, node)
        async with self._client.redis.pipeline() as pipeline:
            for _ in range(UNREGISTER_TRIES):
                await pipeline.watch(key)
                value = await pipeline.get(key)
                report = self._read(value) if value is not None else None
                if report is None or report.epoch != epoch:
                    return False
                pipeline.multi()
                pipeline.delete(key)
                pipeline.zrem(nodes_key(self._pool), node)
                try:
                    await pipeline.execute()
                except WatchError:
                    continue  # somebody registered in between
                return True
        raise StoreUnavailable(f"{self._client.label}: {node} keeps registering")

    def _read(self, value: bytes) -> NodeReport | None:
        try:
            return self._reports.decode(value)
        except WireError as error:
            logger.warning("registry %s: %s", self._client.label, error)
            return None
