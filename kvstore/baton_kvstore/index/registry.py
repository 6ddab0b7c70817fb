"""The registry of a pool on the index: reports with a TTL.

Nodes send a NodeReport as a heartbeat, and routers list them to discover nodes. The operator also
reads the FetchReports of nodes that still download their model and the RouterReports of routers.
Expiry uses the index server's clock (TIME), so a node with a wrong clock expires like any other.
Every method raises StoreUnavailable if the index fails. Use one Registry per event loop.

A reader need not trust the server: replies are bounded, and invalid reports, or reports with
impossible figures, are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import (
    CONNECT_TIMEOUT_S,
    OPERATION_TIMEOUT_S,
    AsyncClient,
    ClosesItself,
)
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import pack
from baton_kvstore.errors import ProtocolBroken
from baton_kvstore.keys import (
    fetch_key,
    fetches_key,
    node_key,
    nodes_key,
    router_key,
    routers_key,
)
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import FetchReport, NodeReport, RouterReport
from baton_protocol.wire import Codec, WireError

logger = logging.getLogger(__name__)
R = TypeVar("R", NodeReport, FetchReport, RouterReport)
DEFAULT_TTL_S = 3.0
# Limits of one list. A report has about 600 bytes, so this suffices for thousands of nodes.
MOST_REPORTS = 4096
MOST_BYTES = 4 << 20
LONGEST_TTL_S = 600.0
_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000); "
_REGISTER = (
    _NOW
    + """
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], 86400000)
"""
)
_UNREGISTER = """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('DEL', KEYS[2])
"""
_WITHDRAW = """
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
"""
# The script derives the reports' keys from the set's members, which works because the index is a
# single server, never a cluster. Values over 64 KiB are skipped: no report is that long.
_LIST = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
-- An expiry this late was written before the clock was set back: shorten it. Live nodes renew it.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[1], '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[2], name)
end
local reports = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')) do
  local report = redis.call('GET', KEYS[1] .. ':' .. name)
  if report and #report <= 65536 then reports[#reports + 1] = report end
end
return reports
"""
)

_LIST_ARGS = [b"%d" % round(seconds * 1000) for seconds in (LONGEST_TTL_S, DEFAULT_TTL_S)]


class Registry(ClosesItself):
    """The registry of one pool.

    If `addresses` (IP addresses of the server) are given, lists are read from these and the host
    name is not resolved. `refused` counts left-out reports, at each list again.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        addresses: Sequence[str] = (),
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        self.refused = 0
        self._complaint = ""
        self._pool = pool
        endpoint = parse_endpoint(url)
        self._client = AsyncClient(endpoint, timeout_s=timeout_s, max_connections=4)
        self._lists = AsyncResp(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            addresses=addresses,
            most_bytes=MOST_BYTES,
        )
        self._reports: Codec[NodeReport] = Codec(NodeReport)
        self._fetches: Codec[FetchReport] = Codec(FetchReport)
        self._routers: Codec[RouterReport] = Codec(RouterReport)
        self._register = self._client.redis.register_script(_REGISTER)
        self._unregister = self._client.redis.register_script(_UNREGISTER)
        self._withdraw = self._client.redis.register_script(_WITHDRAW)

    async def close(self) -> None:
        self._lists.close()
        await self._client.close()

    async def register(self, report: NodeReport, ttl_s: float = DEFAULT_TTL_S) -> None:
        """Register this node for `ttl_s` more seconds, at most LONGEST_TTL_S. The report replaces
        the node's earlier one."""
        keys = [nodes_key(self._pool), node_key(self._pool, report.node)]
        await self._put(keys, report.node, self._reports.encode(report), ttl_s)

    async def unregister(self, node: NodeId, epoch: Epoch) -> bool:
        """Remove this node's report. Return False, without effect, if the registered epoch is
        another: a later start of this node has registered since."""
        keys = [nodes_key(self._pool), node_key(self._pool, node)]
        value: bytes | None = await self._client.call(self._client.redis.get(keys[1]))
        report = self._read(self._reports, value or b"")
        if value is None or isinstance(report, str) or report.epoch != epoch:
            return False
        # Delete only the value just read: another start of the node may register in between.
        return bool(await self._client.call(self._unregister(keys=keys, args=[node, value])))

    async def nodes(self) -> list[NodeReport]:
        """Return all reports that have not expired, sorted by node id."""
        reports = await self._all(nodes_key(self._pool), self._reports)
        return sorted(reports, key=lambda report: report.node)

    async def announce_fetch(self, report: FetchReport, ttl_s: float = DEFAULT_TTL_S) -> None:
        """Report the progress of this node's model download; it expires like a node's report."""
        keys = [fetches_key(self._pool), fetch_key(self._pool, report.node)]
        await self._put(keys, report.node, self._fetches.encode(report), ttl_s)

    async def fetches(self) -> list[FetchReport]:
        """Return all fetch reports that have not expired, sorted by node id."""
        reports = await self._all(fetches_key(self._pool), self._fetches)
        return sorted(reports, key=lambda report: report.node)

    async def announce_router(self, report: RouterReport, ttl_s: float) -> None:
        """Report this router's request counts and latencies; it expires like a node's report."""
        keys = [routers_key(self._pool), router_key(self._pool, report.router)]
        await self._put(keys, report.router, self._routers.encode(report), ttl_s)

    async def withdraw_router(self, router: str) -> None:
        """Remove a router's report. Idempotent."""
        keys = [routers_key(self._pool), router_key(self._pool, router)]
        await self._client.call(self._withdraw(keys=keys, args=[router]))

    async def routers(self) -> list[RouterReport]:
        """Return all router reports that have not expired, sorted by router."""
        reports = await self._all(routers_key(self._pool), self._routers)
        return sorted(reports, key=lambda report: report.router)

    async def _put(self, keys: list[bytes], name: str, value: bytes, ttl_s: float) -> None:
        args = [name, value, max(1, int(min(ttl_s, LONGEST_TTL_S) * 1000))]
        await self._client.call(self._register(keys=keys, args=args))

    async def _all(self, key: bytes, codec: Codec[R]) -> list[R]:
        request = pack(b"EVAL", _LIST.encode(), b"1", key, *_LIST_ARGS)
        values = await self._lists.request(request)
        if not isinstance(values, list) or len(values) > MOST_REPORTS:
            raise ProtocolBroken(
                f"{self._client.label}: not a list of at most {MOST_REPORTS} reports"
            )
        reports, wrong = [], []
        for value in values:
            report = self._read(codec, value or b"")
            if isinstance(report, str):
                wrong.append(report)
            else:
                reports.append(report)
        self.refused += len(wrong)
        if wrong and wrong[0] != self._complaint:  # the same invalid report is read every second
            self._complaint = wrong[0]
            logger.warning(
                "registry %s: ignoring %d reports: %s", self._client.label, len(wrong), wrong[0]
            )
        return reports

    def _read(self, codec: Codec[R], value: bytes) -> R | str:
        """Return the report, or the reason why it is invalid."""
        try:
            return codec.decode(value)
        except WireError as error:
            return str(error)
