"""The planner's last decisions on the index: the operator writes them, routers show them.

A decision is a member of a sorted set, scored by its time, so writing it again changes nothing. The
newest ones are kept. Each method raises StoreUnavailable if the index fails. Use one Decisions per
event loop.

A reader need not trust the server: replies are bounded, and invalid decisions are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.client import CONNECT_TIMEOUT_S, OPERATION_TIMEOUT_S, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.errors import ProtocolBroken
from baton_kvstore.keys import decisions_key
from baton_protocol.store import ScalingDecision
from baton_protocol.wire import Codec, WireError

KEPT = 50
KEPT_S = 7 * 86400
MOST_BYTES = 1 << 20  # of a reply: a decision has at most some kB
# KEYS: the set. ARGV: decisions to keep, seconds, then score and decision of each new one.
_ADD = b"""
for i = 3, #ARGV, 2 do redis.call('ZADD', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[1])
return redis.call('EXPIRE', KEYS[1], ARGV[2])
"""

logger = logging.getLogger(__name__)


class Decisions(ClosesItself):
    """The decisions of one pool. If `addresses` (IP addresses of the server) are given, the host
    name is not resolved."""

    def __init__(
        self,
        url: str,
        pool: str,
        addresses: Sequence[str] = (),
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        endpoint = parse_endpoint(url)
        self._label = endpoint.label
        self._key = decisions_key(pool)
        self._server = AsyncResp(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            addresses=addresses,
            most_bytes=MOST_BYTES,
        )
        self._records: Codec[ScalingDecision] = Codec(ScalingDecision)

    async def close(self) -> None:
        self._server.close()

    async def add(self, decisions: Sequence[ScalingDecision]) -> None:
        """Write decisions, and forget the oldest ones beyond KEPT."""
        args = [b"%d" % KEPT, b"%d" % KEPT_S]
        for decision in decisions:
            args += [b"%d" % decision.at_ms, self._records.encode(decision)]
        await self._server.command(b"EVAL", _ADD, b"1", self._key, *args)

    async def latest(self, count: int = KEPT) -> list[ScalingDecision]:
        """The last decisions, at most `count`, the newest first."""
        values = await self._server.command(b"ZREVRANGE", self._key, b"0", b"%d" % (count - 1))
        if not isinstance(values, list) or len(values) > count:
            raise ProtocolBroken(f"{self._label}: not a list of at most {count} decisions")
        found = [self._read(value) for value in values]
        return [decision for decision in found if decision is not None]

    def _read(self, value: object) -> ScalingDecision | None:
        try:
            return self._records.decode(value if isinstance(value, bytes) else b"")
        except WireError as error:
            logger.debug("index %s: ignoring a decision: %s", self._label, error)
            return None
