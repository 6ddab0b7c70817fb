"""Rate limits of tenants, shared by all routers of a pool: token buckets on the index.

A bucket fills at its rate up to its capacity. A draw of more than the capacity waits for a full
bucket and takes its level below 0. So no request is too large to start, and the average stays at
the rate.

Each call runs one script, by the index server's clock, and raises StoreUnavailable if the index
fails. Use one Budgets per event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_kvstore.connection.client import AsyncClient, ClosesItself
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.keys import budget_key, routers_key

# KEYS: the tenant's buckets, the pool's routers. ARGV: "take" or "give", then rate per s, capacity
# and amount of each bucket. Numbers have 17 digits: Lua's default of 14 would lose microseconds.
_DRAW = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1000000
local known = redis.call('HGETALL', KEYS[1])
local had = {}
for i = 1, #known, 2 do had[known[i]] = tonumber(known[i + 1]) end
if had.at and had.at > now then -- the server's clock was set back: the bucket fills from now on
  had.at = now
  redis.call('HSET', KEYS[1], 'at', string.format('%.17g', now))
end
local since = now - (had.at or now)
local levels, wait, full = {}, 0, 0
for i = 2, #ARGV, 3 do
  local rate, capacity, amount = tonumber(ARGV[i]), tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  if rate > 0 then
    local level = math.min(capacity, (had['b' .. i] or capacity) + since * rate)
    if ARGV[1] == 'take' then
      wait = math.max(wait, (math.min(amount, capacity) - level) / rate)
      level = level - amount
    else
      level = math.min(capacity, level + amount)
    end
    levels[i] = level
    full = math.max(full, (capacity - level) / rate)
  end
end
local routers = redis.call('ZCOUNT', KEYS[2], math.floor(now * 1000), '+inf')
if wait > 0 then return {string.format('%.17g', wait), routers} end
for i, level in pairs(levels) do
  redis.call('HSET', KEYS[1], 'b' .. i, string.format('%.17g', level))
end
redis.call('HSET', KEYS[1], 'at', string.format('%.17g', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(full * 1000) + 1000)
return {'0', routers}
"""


class Draw(NamedTuple):
    """Draw `amount` from a bucket that fills at `rate_per_s` up to `capacity`. A rate of 0 means no
    limit."""

    rate_per_s: float
    capacity: float
    amount: float


@dataclass(frozen=True, slots=True)
class DrawResult:
    """`wait_s` is 0 if the draws were taken, else the seconds until they could be. `routers` is the
    number of live routers that share the limits."""

    wait_s: float
    routers: int


class Budgets(ClosesItself):
    """The rate limits of one pool. The position in `draws` identifies a tenant's bucket."""

    def __init__(self, url: str, pool: str, *, timeout_s: float) -> None:
        self._pool = pool
        self._client = AsyncClient(parse_endpoint(url), timeout_s=timeout_s)
        self._draw = self._client.redis.register_script(_DRAW)

    async def take(self, tenant: str, draws: Sequence[Draw]) -> DrawResult:
        """Take all draws, or none if one bucket is too low."""
        return await self._run("take", tenant, draws)

    async def give(self, tenant: str, draws: Sequence[Draw]) -> None:
        """Return the amounts to the buckets. A negative amount is taken without waiting, even if
        the level falls below 0."""
        await self._run("give", tenant, draws)

    async def close(self) -> None:
        await self._client.close()

    async def _run(self, action: str, tenant: str, draws: Sequence[Draw]) -> DrawResult:
        keys = [budget_key(self._pool, tenant), routers_key(self._pool)]
        numbers = [repr(float(number)) for draw in draws for number in draw]
        wait_s, routers = await self._client.call(self._draw(keys=keys, args=[action, *numbers]))
        return DrawResult(float(wait_s), int(routers))
